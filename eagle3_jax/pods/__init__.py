"""Programs for accelerators that are not there: compiled, weighed, counted."""
