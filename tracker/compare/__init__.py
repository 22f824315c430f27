"""Two commits, runs or files of records, series by series."""
