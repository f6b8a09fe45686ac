"""Measure the time of a streamed token through a proxy and directly, in alternation.

python tests/helpers/through_ray.py SERVER_URL PROXY_URL --pairs 20 --tokens 200

Prints the medians of both, and the median of their ratio with the quartiles.
"""

import argparse
import http.client
import json
import statistics
import time
from urllib.parse import urlsplit

HANG_S = 600


def token_ms(url, number, tokens):
    """Return the milliseconds per token, from the first event of a stream to its last."""
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=HANG_S)
    body = {"prompt": f"Story {number}.", "max_tokens": tokens, "stream": True, "ignore_eos": True}
    head = {"Content-Type": "application/json"}
    connection.request("POST", where.path + "/v1/completions", json.dumps(body), head)
    times = [time.monotonic() for line in connection.getresponse() if line.startswith(b"data: {")]
    connection.close()
    return 1e3 * (times[-1] - times[0]) / (tokens - 1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("server")
    parser.add_argument("proxy")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=200)
    asked = parser.parse_args()
    pairs = [
        (token_ms(asked.server, n, asked.tokens), token_ms(asked.proxy, n, asked.tokens))
        for n in range(asked.pairs)
    ]
    server, proxy = (statistics.median(each) for each in zip(*pairs, strict=True))
    low, ratio, high = statistics.quantiles((theirs / ours for ours, theirs in pairs), n=4)
    print(f"{server:.2f} and {proxy:.2f} ms a token, {ratio:.3f} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
