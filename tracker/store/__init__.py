"""The database: its tables, how records get in and out, and how it is kept for years."""
