"""The models: their sizes, their inputs, and the same losses with our kernels as with torch's."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from stoker_kernels.models.bert import Bert, BertEncoder
from stoker_kernels.models.causal import CausalLM
from stoker_kernels.models.config import (
    TransformerConfig,
    bert_base,
    gpt2_small,
    llama2_7b,
    llama3_8b,
)
from stoker_kernels.nn import Ops, Packing
from tests.kernels._training import STYLES, TINY, batch_of, build, loss_of, train

SWITCHES = [field.name for field in fields(Ops)]


def count(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (gpt2_small(), 124_439_808),
        (llama2_7b(), 6_738_415_616),
        (llama3_8b(), 8_030_261_248),
    ],
)
def test_published_decoders_have_their_size(config: TransformerConfig, published: int) -> None:
    with torch.device("meta"):
        model = CausalLM(config)
    assert count(model) == config.parameter_count == published


def test_bert_base_has_its_size() -> None:
    with torch.device("meta"):
        encoder, whole = BertEncoder(bert_base()), Bert(bert_base())
    assert count(encoder) == BertEncoder.count(bert_base()) == 109_482_240
    assert count(whole) == Bert.count(bert_base()) == 110_106_428


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_the_closed_form_holds_for_every_choice(
    mlp: str, norm: str, bias: bool, tied: bool
) -> None:
    config = TransformerConfig(
        100, 3, 6, 48, 11, kv_heads=2, hidden=40, mlp=mlp, norm=norm, bias=bias, tied=tied,
        position="rotary" if tied else "learned",
    )  # fmt: skip
    with torch.device("meta"):
        assert count(CausalLM(config)) == config.parameter_count


@pytest.mark.parametrize("style", STYLES)
def test_32_steps_equal_torch(style: str) -> None:
    ours, model = train(STYLES[style], 32)
    theirs, reference = train(replace(STYLES[style], ops="torch"), 32)
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=0.0)
    assert ours[-1] < 0.95 * ours[0]
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        # Adam turns a rounding difference in a tiny gradient into a step of the size of lr.
        assert (a - b).abs().mean() < 1e-4


@pytest.mark.parametrize("style", TINY)
def test_steps_through_the_interpreted_kernels_equal_torch(interpreter: None, style: str) -> None:
    ours, _ = train(TINY[style], 5, batch=2)
    theirs, _ = train(replace(TINY[style], ops="torch"), 5, batch=2)
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=0.0)


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("style", STYLES)
def test_each_switch_alone(style: str, switch: str) -> None:
    config = STYLES[style]
    theirs, _ = train(replace(config, ops="torch"), 6)
    alone, _ = train(replace(config, ops=replace(Ops.of("torch"), **{switch: "stoker"})), 6)
    torch.testing.assert_close(alone, theirs, rtol=2e-5, atol=0.0)


@pytest.mark.parametrize("switch", SWITCHES)
def test_each_switch_turns_its_own_op(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the ops of that switch may be called, and they are."""
    prefixes = {
        "norm": ("layer_norm", "rms_norm"),
        "attention": ("attention",),
        "rotary": ("rotary",),
        "mlp": ("bias_gelu", "glu"),
        "loss": ("cross_entropy", "linear_cross_entropy"),
        "optimizer": ("adam",),
    }
    monkeypatch.setenv("STOKER_KERNELS_BACKEND", "reference")
    called = set()
    for config in STYLES.values():
        config = replace(config, ops=replace(Ops.of("torch"), **{switch: "stoker"}))
        with torch.profiler.profile() as profile:
            train(config, 1)
        called |= {event.key for event in profile.key_averages() if "stoker::" in event.key}
    names = {key.split("stoker::")[1] for key in called}
    assert names, f"{switch}: no op of ours ran"
    for name in names:
        assert name.startswith(prefixes[switch]), f"{switch} alone called {name}"


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("style", STYLES)
def test_bf16_losses_are_no_worse_than_torchs(style: str, autocast: bool) -> None:
    """FlashAttention's rule on the loss curve: at most twice torch's own error against fp64.

    The floor is one rounding to bf16, 2^-9 relative, of the curve's mean: two correct runs differ in
    which activations round up. It was measured to be 2 to 5 times the errors of the autocast runs.
    """
    theirs_config = replace(STYLES[style], ops="torch")

    def narrow(model: torch.nn.Module) -> torch.nn.Module:
        return model if autocast else model.to(torch.bfloat16)

    def wide(model: torch.nn.Module) -> torch.nn.Module:
        return narrow(model).double()  # from the same rounded start

    oracle = torch.tensor(train(theirs_config, 32, prepare=wide)[0])
    theirs = torch.tensor(train(theirs_config, 32, prepare=narrow, autocast=autocast)[0])
    ours = torch.tensor(train(STYLES[style], 32, prepare=narrow, autocast=autocast)[0])
    floor = 2**-9 * oracle.mean()
    assert (ours - oracle).abs().max() <= 2 * (theirs - oracle).abs().max() + floor
    assert (ours - oracle).abs().mean() <= 2 * (theirs - oracle).abs().mean() + floor / 4


@pytest.mark.parametrize("ops", ["stoker", "torch"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("style", STYLES)
def test_checkpointing_changes_no_bit(style: str, dropout: float, ops: str) -> None:
    grads = []
    for checkpoint in (False, True):
        config = replace(STYLES[style], dropout=dropout, ops=ops, checkpoint=checkpoint)
        model = build(config)
        inputs = batch_of(config, 3, torch.Generator().manual_seed(2))
        torch.manual_seed(11)
        loss_of(model, inputs).backward()
        grads.append([p.grad for p in model.parameters()])
    for (name, _), a, b in zip(model.named_parameters(), *grads, strict=True):
        assert torch.equal(a, b), name


def test_checkpointing_keeps_less() -> None:
    def kept(checkpoint: bool) -> int:
        config = replace(STYLES["gpt"], checkpoint=checkpoint, layers=4)
        model, sizes = build(config), []
        inputs = batch_of(config, 4, torch.Generator().manual_seed(2))
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (sizes.append(t.numel()), t)[1], lambda t: t
        ):
            loss_of(model, inputs)
        return sum(sizes)

    assert kept(True) < 0.5 * kept(False)


@pytest.mark.parametrize("ops", ["stoker", "torch"])
@pytest.mark.parametrize("style", ["gpt", "llama"])
def test_packed_sequences_equal_single_ones(style: str, ops: str) -> None:
    model = build(replace(STYLES[style], ops=ops))
    lengths = [5, 1, 24, 10]
    tokens = torch.randint(0, 61, (1, sum(lengths)))
    edges = torch.tensor([0, *lengths]).cumsum(0).int()
    packed, _ = model(tokens, packing=Packing.of(edges, sum(lengths), max(lengths)))
    single = [model(part)[0] for part in tokens.split(lengths, 1)]
    torch.testing.assert_close(packed, torch.cat(single, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ops", ["stoker", "torch"])
def test_berts_padding_is_seen_by_nobody(ops: str) -> None:
    model = build(replace(STYLES["bert"], ops=ops)).eval()
    assert isinstance(model, Bert)
    tokens, lengths = torch.randint(0, 61, (3, 24)), torch.tensor([24, 1, 13])
    x, pooled = model.encoder(tokens, lengths=lengths)
    for row, length in enumerate(lengths.tolist()):
        alone, alone_pooled = model.encoder(tokens[row : row + 1, :length])
        torch.testing.assert_close(x[row, :length], alone[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(pooled[row], alone_pooled[0], rtol=1e-4, atol=1e-5)
    # Bidirectional: the first token's vector depends on the last token.
    other = tokens.clone()
    other[0, -1] = (other[0, -1] + 1) % 61
    assert not torch.allclose(model.encoder(other, lengths=lengths)[0][0, 0], x[0, 0])


def test_causal_models_do_not_look_ahead() -> None:
    for style in ("gpt", "llama"):
        model = build(STYLES[style])
        tokens = torch.randint(0, 61, (2, 24))
        other = tokens.clone()
        other[:, 12:] = (other[:, 12:] + 1) % 61
        a, b = model(tokens)[0], model(other)[0]
        torch.testing.assert_close(a[:, :12], b[:, :12])
        assert not torch.allclose(a[:, 12:], b[:, 12:])


@pytest.mark.parametrize("ops", ["stoker", "torch"])
@pytest.mark.parametrize("style", STYLES)
def test_full_logits_change_no_loss(style: str, ops: str) -> None:
    config = replace(STYLES[style], ops=ops)
    inputs = batch_of(config, 2, torch.Generator().manual_seed(1))
    results = []
    for full in (True, False):
        model = build(replace(config, full_logits=full))
        out = model(**inputs)
        logits = out.logits if isinstance(model, Bert) else out[0]
        assert (logits is not None) == full
        loss_of(model, inputs).backward()
        results.append([loss_of(model, inputs), *(p.grad for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("style", STYLES)
def test_compiles_to_one_graph(style: str) -> None:
    inputs = batch_of(STYLES[style], 2, torch.Generator().manual_seed(1))
    grads = []
    for compiled in (False, True):
        model = build(STYLES[style])
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        loss_of(run, inputs).backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_torch_implementation_agrees() -> None:
    """BERT's post-norm layer against torch's own encoder layer, fp64."""
    config = replace(STYLES["bert"], eps=1e-5)
    layer = build(config).encoder.layers[0].double()  # type: ignore[union-attr]
    theirs = torch.nn.TransformerEncoderLayer(
        64, 2, 256, 0.0, "gelu", batch_first=True, dtype=torch.float64
    )
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    attention = theirs.self_attn
    pairs = [
        (attention.in_proj_weight, layer.attention.qkv.weight),
        (attention.in_proj_bias, layer.attention.qkv.bias),
        (attention.out_proj.weight, layer.attention.out.weight),
        (attention.out_proj.bias, layer.attention.out.bias),
        (theirs.linear1.weight, layer.mlp.up.weight),
        (theirs.linear1.bias, layer.mlp.up_bias),
        (theirs.linear2.weight, layer.mlp.down.weight),
        (theirs.linear2.bias, layer.mlp.down.bias),
        (theirs.norm1.weight, layer.norm_attention.weight),
        (theirs.norm1.bias, layer.norm_attention.bias),
        (theirs.norm2.weight, layer.norm_mlp.weight),
        (theirs.norm2.bias, layer.norm_mlp.bias),
    ]
    with torch.no_grad():
        for their, our in pairs:
            their.copy_(our)
    x = torch.randn(2, 9, 64, dtype=torch.float64)
    torch.testing.assert_close(layer(x, None)[0], theirs(x))


@pytest.mark.parametrize("style", STYLES)
def test_a_model_leaves_the_meta_device_tied(style: str) -> None:
    kind = CausalLM if STYLES[style].causal else Bert
    config = replace(STYLES[style], tied=True)
    with torch.device("meta"):
        model = kind(config)
    model.to_empty(device="cpu")
    assert count(model) == count(build(config))
    model.load_state_dict(build(config).state_dict())
    model.double().float()
    tokens = torch.arange(8)[None]
    for ours, other in zip(model(tokens), build(config)(tokens), strict=True):
        assert ours is other is None or torch.equal(ours, other)


def test_weights_can_be_drawn_anew() -> None:
    """Norms too, which the constructor made ones."""
    config = STYLES["gpt"]
    model = build(config)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(float("nan"))
    torch.manual_seed(3)
    model.start()
    assert all(p.isfinite().all() for p in model.parameters())
    assert (model.norm.weight == 1).all()


@pytest.mark.parametrize(
    ("field", "value"),
    [("norm", "rmsnorm"), ("mlp", "relu"), ("position", "rope"), ("heads", 0), ("kv_heads", -1)],
)
def test_a_config_names_what_it_does_not_know(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"TransformerConfig: {field}"):
        TransformerConfig(**{field: value})


def test_errors() -> None:
    with pytest.raises(ValueError, match="not a multiple of kv_heads 3"):
        TransformerConfig(heads=4, kv_heads=3)
    with pytest.raises(ValueError, match=r"dropout must lie in \[0, 1\)"):
        TransformerConfig(dropout=1.0)
    with pytest.raises(ValueError, match=r"Ops: mlp 'cuda': expected stoker or torch"):
        Ops(mlp="cuda")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="exceeds block_size 24"):
        build(STYLES["bert"])(torch.zeros(1, 25).long())
