"""Training, export and conversion of the demo model, with the toy model of `--tiny`."""

import json

import pytest

torch = pytest.importorskip(
    "torch", reason="needs torch: python3 patches/tool.py setup --extras convert"
)
pytest.importorskip(
    "tokenizers", reason="needs tokenizers: python3 patches/tool.py setup --extras convert"
)
pytest.importorskip(
    "safetensors", reason="needs safetensors: python3 patches/tool.py setup --extras convert"
)

from models.demo.training import train  # noqa: E402


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    out = tmp_path_factory.mktemp("toy")
    args = train.parse_args(["--tiny", "--steps", "3", "--out", str(out)])
    return train.train(args)


def test_tiny_writes_a_checkpoint(toy):
    from safetensors import safe_open

    config = json.loads((toy / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert config["moe_intermediate_size"] % 256 == 0 and config["hidden_size"] % 256 == 0
    with safe_open(toy / "model.safetensors", "pt") as f:
        names = set(f.keys())
        shape = f.get_slice("model.layers.0.mlp.experts.3.down_proj.weight").get_shape()
    assert "model.layers.1.mlp.gate.weight" in names
    assert shape == [config["hidden_size"], config["moe_intermediate_size"]]
    template = json.loads((toy / "tokenizer_config.json").read_text())["chat_template"]
    assert "<|im_start|>" in template


def test_logits_equal_transformers(toy):
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    from models.demo.training.evaluate import load_hf

    ids = torch.randint(0, 1024, (2, 40), generator=torch.Generator().manual_seed(1))
    ours = load_hf(toy).logits(ids, torch.float32)
    other = transformers.Qwen3MoeForCausalLM.from_pretrained(toy, dtype=torch.float32)
    with torch.no_grad():
        theirs = other.eval()(ids).logits
    assert torch.allclose(ours, theirs, atol=2e-3, rtol=1e-3)


def test_gradients_equal_plain_autograd():
    """The hand-written backward passes equal torch's on a dense formulation."""
    torch.manual_seed(0)
    from models.demo.training.kernels import Kernels
    from models.demo.training.products import AttentionFunction, ExpertsFunction

    kernels = Kernels(False)
    n, k, e, d, f = 37, 2, 4, 16, 8
    x = torch.randn(n, d, requires_grad=True)
    up = torch.randn(e, d, 2 * f, requires_grad=True)
    down = torch.randn(e, f, d, requires_grad=True)
    logits = torch.randn(n, e, requires_grad=True)
    inputs = (x, up, down, logits)

    def dense(weight, ids):
        gate, value = torch.einsum("nd,edf->nef", x, up).chunk(2, -1)
        y = torch.einsum("nef,efd->ned", torch.nn.functional.silu(gate) * value, down)
        return (y.gather(1, ids[..., None].expand(-1, -1, d)) * weight[..., None]).sum(1)

    top, ids = logits.softmax(-1).topk(k)
    expected = torch.autograd.grad(dense(top, ids).sin().sum(), inputs)
    top, ids = logits.softmax(-1).topk(k)
    got = torch.autograd.grad(
        ExpertsFunction.apply(x, ids, top, up, down, kernels).sin().sum(), inputs
    )
    for a, b in zip(got, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-4, rtol=1e-3)

    q, key, v = (torch.randn(2, 6, 8, requires_grad=True) for _ in range(3))
    mask = torch.ones(6, 6).tril().expand(2, 6, 6)
    plain = torch.nn.functional.scaled_dot_product_attention(q, key, v, attn_mask=mask.bool())
    want = torch.autograd.grad(plain.sin().sum(), (q, key, v))
    have = torch.autograd.grad(
        AttentionFunction.apply(q, key, v, mask, kernels).sin().sum(), (q, key, v)
    )  # fmt: skip
    for a, b in zip(have, want, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_resume_continues_at_the_saved_step(tmp_path):
    train.main(["--tiny", "--steps", "2", "--out", str(tmp_path)])
    train.main(["--tiny", "--steps", "4", "--resume", "--out", str(tmp_path)])
    steps = [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").open()]
    assert steps == [1, 2, 3, 4]
