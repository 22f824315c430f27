"""The dashboard: the report's contents, live from the database, and forms for incidents.

Nothing here is imported by another command; starlette, uvicorn and jinja2 come with the extra `serve`.
"""
