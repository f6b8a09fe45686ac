"""Write the sparse model: the neurons of a dense one as experts and shared experts.

The architecture is `bailingmoe`. It has the dense model's rotary embeddings, shared experts next to
the routed ones, and weights that are normalised and scaled. With the scale k and router logits
close to 0, each of the k chosen experts has a weight close to 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gguf_tools.file.layout import EMBEDDINGS, FILE_TYPE, KEY_FILE_TYPE, OUTPUT, GGMLType, ValueType
from gguf_tools.file.writer import GGUFWriter
from models.real.activations import Floats
from models.real.dense import ARCH, DenseModel
from models.real.split import Groups

SPARSE_ARCH = "bailingmoe"
_FFN = (".ffn_gate.weight", ".ffn_up.weight", ".ffn_down.weight")


def write_sparse(
    model: DenseModel,
    groups: Sequence[Groups],
    routers: Sequence[Floats],
    n_used: int,
    path: Path,
) -> None:
    """Write the sparse model that a dense model is split into, with every matrix in F16.

    - groups: the neurons of each expert, and the shared neurons, of each layer.
    - routers: the router matrix of each layer.
    - n_used: number of experts that a token uses in each layer.
    """
    n_expert, size = groups[0].experts.shape
    n_shared = len(groups[0].shared)
    with GGUFWriter(path) as writer:
        _metadata(model, writer, n_expert, size, n_shared, n_used)
        others = [info for name, info in model.file.tensors.items() if not name.endswith(_FFN)]
        for info in others:
            matrix = len(info.shape) > 1
            writer.declare(info.name, info.shape, GGMLType.F16 if matrix else info.type)
        if tied := OUTPUT not in model.file.tensors:
            # The new architecture needs a separate output matrix. If the model has none, write a
            # copy of the embedding.
            writer.declare(OUTPUT, model.file.tensors[EMBEDDINGS].shape, GGMLType.F16)
        for layer in range(model.n_layers):
            writer.declare(
                f"blk.{layer}.ffn_gate_inp.weight", (model.n_embd, n_expert), GGMLType.F32
            )
            for kind, inner in (("gate", False), ("up", False), ("down", True)):
                for suffix, n, more in (("exps", size, (n_expert,)), ("shexp", n_shared, ())):
                    rows = (n, model.n_embd) if inner else (model.n_embd, n)
                    name = f"blk.{layer}.ffn_{kind}_{suffix}.weight"
                    writer.declare(name, (*rows, *more), GGMLType.F16)
        writer.begin()
        for info in others:
            data = model.file.array(info.name)
            if len(info.shape) > 1:
                data = model.matrix(info.name).astype(np.float16)
            writer.write_tensor(info.name, data)
        if tied:
            writer.write_tensor(OUTPUT, model.matrix(EMBEDDINGS).astype(np.float16))
        for layer, (group, router) in enumerate(zip(groups, routers, strict=True)):
            _write_layer(model, writer, layer, group, router)


def _write_layer(
    model: DenseModel, writer: GGUFWriter, layer: int, group: Groups, router: Floats
) -> None:
    """Write the expert matrices, the shared matrices and the router of a layer.

    `group` says which neurons of the dense layer each expert has, and which neurons are shared.
    """
    writer.write_tensor(f"blk.{layer}.ffn_gate_inp.weight", router)
    for kind in ("gate", "up", "down"):
        matrix = model.ffn(layer, kind).astype(np.float16)
        if kind == "down":
            experts, shared = matrix.T[group.experts].transpose(0, 2, 1), matrix[:, group.shared]
        else:
            experts, shared = matrix[group.experts], matrix[group.shared]
        writer.write_tensor(f"blk.{layer}.ffn_{kind}_exps.weight", np.ascontiguousarray(experts))
        writer.write_tensor(f"blk.{layer}.ffn_{kind}_shexp.weight", np.ascontiguousarray(shared))


def _metadata(
    model: DenseModel, writer: GGUFWriter, n_expert: int, size: int, n_shared: int, n_used: int
) -> None:
    """Write the dense model's metadata for the new architecture, and add that of the experts.

    size: neurons per expert. n_shared: number of shared neurons.
    """
    for key in model.file.metadata:
        name = key.replace(f"{ARCH}.", f"{SPARSE_ARCH}.", 1) if key.startswith(ARCH) else key
        writer.meta_encoded(name, model.file.encoded_value(key))
    writer.meta("general.architecture", SPARSE_ARCH)
    writer.meta("general.name", f"SmolLM2 135M split, {n_used} of {n_expert} experts")
    writer.meta(KEY_FILE_TYPE, FILE_TYPE[GGMLType.F16], ValueType.UINT32)
    for name, value in (
        ("expert_count", n_expert),
        ("expert_used_count", n_used),
        ("expert_feed_forward_length", size),
        ("expert_shared_count", n_shared // size),
        ("leading_dense_block_count", 0),
    ):
        writer.meta(f"{SPARSE_ARCH}.{name}", value, ValueType.UINT32)
    writer.meta(f"{SPARSE_ARCH}.expert_weights_scale", float(n_used))
    writer.meta(f"{SPARSE_ARCH}.expert_weights_norm", True)
