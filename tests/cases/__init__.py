"""One file for each entry of the catalogue of faults seen in public bug trackers."""
