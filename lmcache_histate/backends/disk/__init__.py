"""A disk store that can be trusted, and the LMCache L2 adapter on top of it.

`record`, `io`, `lock`, `ledger`, `catalogue`, `index`, `recovery`, `store` and `fsck` know nothing of LMCache and can
be used without it; `adapter` is the only module that imports `lmcache`.
"""
