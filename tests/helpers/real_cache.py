"""The real user's cache folder.

It is read before the first test, because every test has a temporary home.
"""

from patches.upstream import cache_dir

# Tests may read the files there, and must not write.
REAL_CACHE = cache_dir()
