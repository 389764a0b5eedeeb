"""The LMCache side: the only package that imports `lmcache`."""
