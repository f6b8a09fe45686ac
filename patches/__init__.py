"""The pinned upstream, the patches on it, and the tool that builds one wheel from both."""
