"""Download models from the Hugging Face Hub into huggingface_hub's cache.

The usual environment variables apply: HF_HOME, HF_TOKEN and HF_ENDPOINT.
"""

from gguf_tools.hub.contents import Download, HubFile, prepare
from gguf_tools.hub.download import fetch
from gguf_tools.hub.listing import ListedModel, Listing, list_models
from gguf_tools.hub.pulled import Pulled, find_pulled, pulled, remove, short_name
from gguf_tools.hub.remote import Headers, fetch_headers, fetch_listed_headers, is_remote
from gguf_tools.hub.resolve import resolve, resolve_checkpoint
from gguf_tools.hub.selection import PREFIX

__all__ = [
    "PREFIX",
    "Download",
    "Headers",
    "HubFile",
    "ListedModel",
    "Listing",
    "Pulled",
    "fetch",
    "fetch_headers",
    "fetch_listed_headers",
    "find_pulled",
    "is_remote",
    "list_models",
    "prepare",
    "pulled",
    "remove",
    "resolve",
    "resolve_checkpoint",
    "short_name",
]
