"""The HTML report: one file that opens offline, with tables to sort and filter and charts to look into."""
