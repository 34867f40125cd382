"""`edkm compress --dry-run`: a run rehearsed on the meta device, and what it needs of a machine."""
