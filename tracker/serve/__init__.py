"""The dashboard: what the report shows, live from the database, and alerts to be dealt with.

Nothing here is imported by another command; starlette, uvicorn and jinja2 come with the extra `serve`.
"""
