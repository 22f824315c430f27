"""The database: tables, reading and writing records, and maintenance."""
