"""``apply`` on transformers' families: the same loss and gradients, compiled too, and exactly undone."""

from __future__ import annotations

import copy
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker_kernels import Applied, apply
from stoker_kernels.patching.catalogue import ENTRIES, LEFT
from stoker_kernels.patching.recognition import digest, qualified
from tests.kernels.patching._families import FAMILIES, SEQ, VOCAB, batch, build, step, worst

ROTARY = {"llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma2", "gpt_neox", "falcon"}
CAUSAL = sorted(set(FAMILIES) - {"bert", "t5"})


def kernels_of(applied: Applied) -> set[str]:
    return {kernel for kernels in applied.replaced.values() for kernel in kernels.split(", ")}


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_are_those_of_the_model(family: str, seed: int) -> None:
    if family == "mixtral":
        seed = 0  # a tie between two experts would be decided by rounding
    theirs = build(family, seed)
    ours = copy.deepcopy(theirs)
    before = {name: id(parameter) for name, parameter in ours.named_parameters()}
    keys = list(ours.state_dict())
    applied = apply(ours)
    assert {name: id(parameter) for name, parameter in ours.named_parameters()} == before
    assert list(ours.state_dict()) == keys
    expected = {"cross_entropy", *({"rotary"} if family in ROTARY else ())}
    expected |= {"linear_cross_entropy"} if family != "gemma2" else set()
    expected |= {"attention"} | ({"grouped_gemm"} if family == "mixtral" else set())
    assert expected <= kernels_of(applied), str(applied)
    for padding in ("none", "left", "right"):
        inputs = batch(padding, seed, causal=family in CAUSAL)
        if padding == "none":
            del inputs["attention_mask"]
        loss, grads = step(theirs, inputs)
        our_loss, our_grads = step(ours, inputs)
        assert our_loss == pytest.approx(loss, abs=1e-5), padding
        assert worst(our_grads, grads) < 1e-4, padding
    with torch.no_grad():  # what evaluation reads
        inputs = batch("right", seed)
        logits, our_logits = theirs.eval()(**inputs).logits, ours.eval()(**inputs).logits
        real = inputs["attention_mask"].bool() if family != "t5" else ...
        assert (our_logits - logits)[real].abs().max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_undo_restores_every_class_and_attribute(family: str) -> None:
    model = build(family)
    before = _picture(model)
    applied = apply(model)
    once = _picture(model)
    assert once != before
    again = apply(model)
    assert _picture(model) == once
    assert (again.replaced, again.left) == (applied.replaced, applied.left)
    applied.undo()
    assert _picture(model) == before
    applied.undo()
    apply(model)
    apply(model).undo()  # that of a second call undoes as well
    assert _picture(model) == before


def _picture(model: torch.nn.Module) -> list[Any]:
    """Return classes, attributes and hooks of every module."""
    hooks = ("_forward_pre_hooks", "_forward_hooks")
    return [
        (name, type(m), sorted(m.__dict__), id(getattr(m, "config", None)),
         [list(getattr(m, h).values()) for h in hooks])
        for name, m in model.named_modules()
    ]  # fmt: skip


def test_what_was_set_in_the_config_since_stays_after_undo() -> None:
    model = build("llama")
    given = model.config
    applied = apply(model)
    model.resize_token_embeddings(128)
    model.config.use_cache = False
    with pytest.raises(ValueError, match="the kernels of an earlier call"):
        apply(model, skip={"linear_cross_entropy"})
    applied.undo()
    assert model.config is given
    assert (given.vocab_size, given.use_cache) == (128, False)
    assert given._attn_implementation != "stoker"


def test_the_guide_says_what_is_replaced() -> None:
    page = Path(__file__).parents[3] / "docs/how-to/kernels-for-your-model.md"
    rows = re.findall(
        r"^\| (\w+) \| (\w+(?:, \w+)*) \| ?(.*?) ?\|$", page.read_text(), re.MULTILINE
    )
    told = {name: (set(kernels.split(", ")), bool(left)) for name, kernels, left in rows[1:]}
    found = {}
    for family, (name, _, _) in FAMILIES.items():
        applied = apply(build(family))
        found[name] = (kernels_of(applied), bool(applied.left))
    found["Falcon"] = (found["Falcon"][0], bool(apply(build("falcon", alibi=True)).left))
    assert told == found


def test_digests_are_those_of_the_installed_transformers() -> None:
    seen = set()
    for family in FAMILIES:
        for module in build(family).modules():
            name = qualified(type(module))
            if name in ENTRIES and ENTRIES[name].digests:
                assert digest(type(module)) in ENTRIES[name].digests, name
            seen.add(name)
    missing = {name for name in (*ENTRIES, *LEFT) if name.startswith("transformers")} - seen
    # What these models have no use for.
    assert {name.rpartition(".")[2] for name in missing} == {
        "BertCrossAttention", "T5DenseActDense", "FalconFlashAttention2"
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at it, in a hook's tensors
@pytest.mark.parametrize("family", ["llama", "bert", "falcon"])
def test_torch_compile_sees_whole_graphs(family: str, seed: int) -> None:
    torch._dynamo.reset()
    model = build(family, seed)
    inputs = batch("left" if family == "falcon" else "right", seed, causal=family != "bert")
    loss, grads = step(model, inputs)
    apply(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    our_loss, our_grads = step(compiled, inputs)
    assert our_loss == pytest.approx(loss, abs=1e-5)
    ours = {name.removeprefix("_orig_mod."): grad for name, grad in our_grads.items()}
    assert worst(ours, grads) < 1e-4


@pytest.mark.parametrize("family", ["qwen3", "t5"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(family: str, reentrant: bool, seed: int) -> None:
    model = build(family, seed)
    inputs = {**batch("left", seed), "use_cache": False}
    loss, grads = step(model, inputs)
    apply(model)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    our_loss, our_grads = step(model, inputs)
    assert our_loss == pytest.approx(loss, abs=1e-5)
    assert worst(our_grads, grads) < 1e-4


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "falcon", "mistral", "t5"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_writes_the_same_tokens(family: str, cache: str) -> None:
    # Of one seed: a tie between two tokens would be decided by rounding.
    model = build(family).eval()
    inputs = batch("left")
    del inputs["labels"]
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    if cache == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    theirs = model.generate(**inputs, **options)
    apply(model)
    assert model.generate(**inputs, **options).tolist() == theirs.tolist()


def test_t5_counts_distances_in_padded_rows_from_where_they_begin(seed: int) -> None:
    model = build("t5", seed, relative_attention_num_buckets=8, relative_attention_max_distance=20)
    generator = torch.Generator().manual_seed(seed)
    inputs = {
        name: torch.randint(3, VOCAB, (3, length), generator=generator)
        for name, length in (("input_ids", 50), ("decoder_input_ids", 40))
    }
    inputs["attention_mask"], mask = (torch.ones_like(ids) for ids in inputs.values())
    inputs["attention_mask"][1, 30:] = inputs["attention_mask"][2, :17] = 0
    mask[1, :9] = mask[2, 25:] = 0
    inputs["decoder_attention_mask"] = mask
    inputs["labels"] = inputs["decoder_input_ids"].masked_fill(mask == 0, -100)
    loss, grads = step(model, inputs)
    apply(model)
    our_loss, our_grads = step(model, inputs)
    assert our_loss == pytest.approx(loss, abs=1e-5)
    assert worst(our_grads, grads) < 1e-4
    ids, mask, decoded = (inputs[n] for n in ("input_ids", "attention_mask", "decoder_input_ids"))
    by_place = model(ids, mask, decoded, inputs["decoder_attention_mask"], labels=inputs["labels"])
    assert by_place.loss.item() == our_loss
    with pytest.raises(ValueError, match='output_attentions needs attn_implementation="eager"'):
        model(**inputs, output_attentions=True)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_packed_sequences_stay_apart(family: str, seed: int) -> None:
    model = build(family, seed)
    inputs: dict[str, Any] = {
        "input_ids": batch("none", seed)["input_ids"],
        "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7], [*range(12)], [0, *range(11)]]),
        "use_cache": False,
    }  # fmt: skip
    inputs["labels"] = inputs["input_ids"]
    loss, grads = step(model, inputs)
    apply(model)
    our_loss, our_grads = step(model, inputs)
    assert our_loss == pytest.approx(loss, abs=1e-5)
    assert worst(our_grads, grads) < 1e-4


def test_a_model_with_kernels_is_copied_and_pickled_as_one(seed: int) -> None:
    model = build("llama", seed)
    apply(model)
    inputs = batch("right", seed)
    loss, _ = step(model, inputs)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert step(other, inputs)[0] == pytest.approx(loss, abs=1e-6)
        assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
        apply(other).undo()
        assert not any(hasattr(m, "_stoker_original") for m in other.modules())
        assert other.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == "stoker"


def test_a_checkpoint_names_the_model_as_before(tmp_path: Any, seed: int) -> None:
    model = build("llama", seed)
    plain = model.config.to_dict()
    apply(model)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert again.config.architectures == ["LlamaForCausalLM"]
    assert set(model.config.to_dict()) - {"architectures"} <= set(plain) | {"dtype"}
    inputs = batch("right", seed)
    assert again(**inputs).loss.item() == pytest.approx(model(**inputs).loss.item(), abs=1e-5)


def test_trainers_count_of_tokens_is_the_divisor(seed: int) -> None:
    model = build("llama", seed)
    inputs = {**batch("right", seed), "num_items_in_batch": torch.tensor(7)}
    loss, grads = step(model, inputs)
    apply(model)
    our_loss, our_grads = step(model, inputs)
    assert our_loss == pytest.approx(loss, rel=1e-5)
    assert worst(our_grads, grads) < 1e-4
    assert SEQ < VOCAB
