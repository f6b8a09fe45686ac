"""A GPU and a CXL memory that computes: how long each takes for an expert and for a layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from orchestrator.errors import ConfigError
from orchestrator.settings import Settings, setting

FULL_BITS = 16
_MATRICES = 3  # gate, up and down
# Table 2. The near-data memory: products a second of 64 arrays of 4 x 4 at 1 GHz, for
# weights of 16 bits; of b bits they do 16 / b times as many. The GPU: memory and peak. The link.
NEAR_MACS_PER_S = 64 * 4**2 * 1e9
GPU_BYTES, GPU_FLOPS = 80e9, 989.4e12
LINK_US = 2.0


@dataclass(frozen=True, slots=True)
class PaperModel:
    """A model as the near-data paper's Table 1 has it. kv_width: of keys, and of values, of one
    token. other_weights: those outside of experts. n_hot: hot experts of a layer in section 5.1.
    migrations: expert migrations a token with which MoNDE comes to the paper's speed-ups."""

    name: str
    hidden: int
    ffn: int
    n_layers: int
    n_expert: int
    n_expert_used: int
    kv_width: int
    other_weights: float
    n_hot: int
    migrations: float

    @property
    def expert_weights(self) -> int:
        return _MATRICES * self.hidden * self.ffn

    def expert_bytes(self, bits: float = FULL_BITS) -> float:
        """Of one expert at so many bits a weight, scales left out."""
        return self.expert_weights * bits / 8

    @property
    def attention_weights(self) -> int:
        """Of one layer: queries and output, keys and values."""
        return 2 * self.hidden * (self.hidden + self.kv_width)


SHAPES = {
    shape.name: shape
    for shape in (
        PaperModel("mixtral-8x7b", 4096, 14336, 32, 8, 2, 1024, 1.6e9, 4, 1.1),
        PaperModel("mixtral-8x22b", 6144, 16384, 56, 8, 2, 1024, 5.1e9, 2, 2.8),
    )
}

_RATE = (1e-3, 1e9)


@dataclass(frozen=True)
class NearDataMachine(Settings):
    """The rates of one GPU and one near-data memory. Times are in milliseconds; one sequence
    decodes."""

    near_gbps: float = setting(
        512.0, "What the near-data memory reads for itself, in GB/s.", within=_RATE
    )
    hbm_gbps: float = setting(3350.0, "What the GPU reads from its memory, in GB/s.", within=_RATE)
    link_gbps: float = setting(
        25.0, "The link between the two, in GB/s each way (PCIe 4.0 x16).", within=_RATE
    )
    overhead_us: float = setting(
        0.0, "What each layer of a step takes besides, in microseconds.", within=(0.0, 1e6)
    )

    def gpu_ms(self, shape: PaperModel, n_tokens: float = 1, bits: float = FULL_BITS) -> float:
        """One expert on the GPU for so many tokens: the slower of reading and multiplying."""
        read = shape.expert_bytes(bits) / (self.hbm_gbps * 1e9)
        multiply = 2 * n_tokens * shape.expert_weights / GPU_FLOPS
        return 1e3 * max(read, multiply)

    def near_ms(self, shape: PaperModel, bits: float = FULL_BITS, n_tokens: float = 1) -> float:
        """One expert in the near-data memory, where its weights lie at so many bits."""
        read = shape.expert_bytes(bits) / (self.near_gbps * 1e9)
        macs_per_s = NEAR_MACS_PER_S * FULL_BITS / bits
        return 1e3 * max(read, n_tokens * shape.expert_weights / macs_per_s)

    def link_ms(self, n_bytes: float) -> float:
        """Bytes over the link, without its latency."""
        return n_bytes / (self.link_gbps * 1e6)

    def trip_ms(self, shape: PaperModel, n_tokens: float = 1) -> float:
        """Activations to the near-data memory and back, FP16, once a layer."""
        return 2 * (LINK_US / 1e3 + self.link_ms(2 * shape.hidden * n_tokens))

    def dense_ms(self, shape: PaperModel, n_tokens: float = 1) -> float:
        """What a layer computes on the GPU besides experts, the attention's weights, and its
        overhead. Keys and values are left out."""
        read = 2 * shape.attention_weights / (self.hbm_gbps * 1e9)
        multiply = 2 * n_tokens * shape.attention_weights / GPU_FLOPS
        return 1e3 * max(read, multiply) + self.overhead_us / 1e3

    def layers_ms(self, shape: PaperModel, hot: np.ndarray, near: np.ndarray) -> np.ndarray:
        """Layers of decode steps: the GPU's experts and the near-data memory's side by side.

        hot, near: float64 of one shape, what the hot experts of a layer and token take on the GPU
        and the others in the near-data memory; there is no trip where near is 0.
        """
        there = np.where(near > 0, near + self.trip_ms(shape), 0.0)
        times: np.ndarray = self.dense_ms(shape) + np.maximum(hot, there)
        return times

    def prefill_layer_ms(
        self, shape: PaperModel, tokens: np.ndarray, on_gpu: np.ndarray, n_prompt: int
    ) -> tuple[float, np.ndarray]:
        """A layer of a prompt, and the experts that went through the GPU, bool [E].

        tokens float64 [E]: of the prompt, by expert; on_gpu bool [E]. What is not on the GPU is
        streamed there, over the link, or computed near its memory at 16 bits: those with the most
        tokens are streamed, so many of them that both sides together end soonest.
        """
        gpu = sum(self.gpu_ms(shape, n) for n in tokens[on_gpu] if n > 0)
        rest = [e for e in np.argsort(-tokens, kind="stable") if not on_gpu[e] and tokens[e] > 0]
        stream = self.link_ms(shape.expert_bytes())
        near = [self.near_ms(shape, n_tokens=tokens[e]) for e in rest]
        trip = self.trip_ms(shape, n_prompt)
        best, n_streamed = np.inf, 0
        for n in range(len(rest) + 1):
            left = sum(near[n:]) + (trip if n < len(rest) else 0.0)
            took = max(gpu, n * stream, left)
            if took < best:
                best, n_streamed = took, n
        streamed = np.zeros(len(tokens), bool)
        streamed[rest[:n_streamed]] = True
        return self.dense_ms(shape, n_prompt) + best, streamed


def gpu_slots(shape: PaperModel) -> float:
    """Experts at 16 bits that the GPU's memory holds beside the other weights."""
    return (GPU_BYTES - 2 * shape.other_weights) / shape.expert_bytes()


def check(shape: PaperModel, n_hot: int) -> None:
    """Raises ConfigError where so many hot experts of a layer are too many."""
    if n_hot > shape.n_expert:
        raise ConfigError(f"--hot {n_hot}: {shape.name} has {shape.n_expert} a layer")
    if n_hot * shape.n_layers > gpu_slots(shape):
        raise ConfigError(
            f"--hot {n_hot}: the GPU's {GPU_BYTES / 1e9:g} GB hold at most "
            f"{int(gpu_slots(shape) / shape.n_layers)} of each layer of {shape.name}"
        )
