"""moe-edge as a model of EleutherAI's lm_eval (the extra `eval`).

lm_eval finds the models that it ships and those that were imported before it looks, so its
command line is started here:

    python -m orchestrator.lab.eval.harness run --model moe-edge --model_args model=FILE --tasks ...

Importing this module does the same for a Python program. The arguments are settings of
`orchestrator.config.Config`, sizes as on the command line. Log-likelihoods come from decode
decisions, token by token, and every expert is computed in the tier that was decided. Texts are
generated as answers of a chat are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import closing
from typing import Any

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError(
        "lm_eval is missing: install it with `pip install 'moe-edge[eval]'`"
    ) from error

from orchestrator.config import Config
from orchestrator.errors import ConfigError
from orchestrator.lab.eval.judge import Judge
from orchestrator.runtime.answering import Answering
from orchestrator.runtime.runtime import Runtime

_MAX_GEN_TOKENS = 256


@register_model("moe-edge")
class MoeEdgeLM(TemplateLM):
    """A loaded model for lm_eval, which asks for the log-likelihood of a continuation, that of a whole
    text, and generated text."""

    def __init__(
        self,
        batch_size: Any = None,
        max_batch_size: Any = None,
        device: Any = None,
        **settings: Any,
    ) -> None:
        """Load the model. settings: those of Config, `model` at least. lm_eval always passes the
        three named ones, which have no effect: one sequence is evaluated at a time, on the CPU.
        Raises MoeEdgeError in one of its forms."""
        super().__init__()
        for name, declared in Config.declared().items():
            if name in settings and declared.unit is not None:
                settings[name] = declared.parse(str(settings[name]))
        settings.setdefault("exact_tiers", True)
        config = Config.build(**settings)
        config = config.with_changes(threads=config.n_threads)
        self.runtime = Runtime.open(config, answering=Answering())
        self._begin = self._tokenize("")

    def _tokenize(self, text: str) -> list[int]:
        return self.runtime.vocabulary.tokenize(text, add_special=True, parse_special=True)

    @property
    def max_length(self) -> int:
        """Tokens that a context and its continuation may have."""
        return self.runtime.about.n_ctx

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text. Raises ConfigError for a model that names none."""
        for name in ("eot", "eos"):
            token = self.runtime.model.metadata.get(f"tokenizer.ggml.{name}_token_id")
            if isinstance(token, int):
                return token
        raise ConfigError(f"{self.runtime.config.model} names no token that ends a text")

    @property
    def prefix_token_id(self) -> int:
        """What an empty context is: the begin token where the model wants one."""
        return self._begin[0] if self._begin else self.eot_token_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Tokens of a text, names of control tokens read as such. add_special_tokens False:
        without the begin token."""
        tokens = self._tokenize(string)
        return tokens[len(self._begin) :] if add_special_tokens is False else tokens

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        # Continuations of one context one after the other: it is evaluated once.
        order = sorted(range(len(requests)), key=lambda i: requests[i][1])
        results: dict[int, tuple[float, bool]] = {}
        with self.runtime.evaluator() as evaluator:
            judge = Judge(evaluator)
            for i in order:
                name, context, continuation = requests[i]
                if len(continuation) >= self.max_length:
                    raise ConfigError(
                        f"a continuation of {len(continuation)} tokens does not fit the context of "
                        f"{self.max_length}: raise ctx"
                    )
                logp, greedy = judge.continuation(context, continuation)
                results[i] = float(logp.sum()), greedy
                if name is not None:
                    self.cache_hook.add_partial("loglikelihood", name, results[i])
        return [results[i] for i in range(len(requests))]

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in windows of the context that do not overlap."""
        results = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,
                context_len=1,
            )
            pairs = [(None, *make_disjoint_window(window)) for window in windows]
            total = sum(logp for logp, _ in self._loglikelihood_tokens(pairs))
            results.append(total)
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return results

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Write up to the first of the stop texts; greedily unless do_sample is asked for."""
        results = []
        for context, given in (request.args for request in requests):
            until = given.get("until") or []
            until = [until] if isinstance(until, str) else list(until)
            most = int(given.get("max_gen_toks", _MAX_GEN_TOKENS))
            sampled = given.get("do_sample", False)
            room = self.max_length - min(most, self.max_length // 2)
            body = {
                "prompt": self.tok_encode(context)[-room + 1 :] or [self.prefix_token_id],
                "n_predict": most,
                "temperature": float(given.get("temperature", 1.0)) if sampled else 0.0,
                "stop": [stop for stop in until if stop],
            }
            with closing(self.runtime.submit(json.dumps(body).encode(), "/completion")) as answer:
                text = "".join(part["content"] for part in answer)
            results.append(text)
            self.cache_hook.add_partial("generate_until", (context, given), text)
        return results


def main() -> None:
    """lm_eval's own command line, with the model "moe-edge" in it."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    # Under its own name: as __main__ the model would be registered a second time by lm_eval.
    sys.modules["orchestrator.lab.eval.harness"] = sys.modules["__main__"]
    main()
