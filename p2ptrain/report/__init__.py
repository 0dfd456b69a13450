"""The report: a page about a run, for whoever was not there, that needs nothing but itself."""
