"""The real user's cache folder. Every test has a temporary home, so it is read before the first one
begins."""

from patches.upstream import cache_dir

# What is there already may be read by the tests that check it, and never written.
REAL_CACHE = cache_dir()
