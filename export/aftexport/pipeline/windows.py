"""The policy of windows of an export, from its options; see ``aftexport.chunked.windows``."""

from collections.abc import Mapping

import numpy as np

from aftexport.bundle.golden import Case, random_tokens
from aftexport.bundle.manifest import Aggregate, WindowLayout, WindowPolicy
from aftexport.bundle.tokenizer import added_ids, parse_tokenizer
from aftexport.capture.model_spec import InputSpec
from aftexport.chunked.windows import Cut, WindowRuns
from aftexport.engines import Engine
from aftexport.errors import UsageError
from aftexport.heads import FeatureExtraction, Head, SingleLabelClassification
from aftexport.options import ExportOptions
from aftexport.pipeline.traced_model import with_extras

_MORE_TOKENS = 7
"""The tokens of the case beyond windows that are all at their strides."""


def layout_of(options: ExportOptions, spec: InputSpec, tokenizer: str | None) -> WindowLayout:
    """Return the places of the windows.

    Raises:
        UsageError: if an option does not suit the model or its tokenizer.
    """
    limit = spec.max_tokens
    if options.window is None and limit is None:
        raise UsageError(
            "--long-documents windows needs --window for a model without a limit, got none.",
            "Give --window, for example 512.",
        )
    tokens = options.window or limit or 1
    if limit is not None and tokens > limit:
        raise UsageError(
            f"--window must be at most {limit}, the limit of the model, got {tokens}.",
            f"Give {limit} or less.",
        )
    prefix, suffix = ((), ()) if tokenizer is None else added_ids(parse_tokenizer(tokenizer))
    content = tokens - len(prefix) - len(suffix)
    if content < 1:
        raise UsageError(
            f"--window must be more than the {tokens - content} tokens that the tokenizer adds, "
            f"got {tokens}.",
            "Give a longer one.",
        )
    stride = options.stride or min(max(1, tokens * 3 // 4), content)
    if stride > content:
        raise UsageError(
            f"--stride must be at most {content}, the text in a window of {tokens} tokens, got "
            f"{stride}.",
            f"Give {content} or less.",
        )
    return WindowLayout(tokens=tokens, stride=stride, prefix=prefix, suffix=suffix)


def policy_of(
    options: ExportOptions, heads: Mapping[str, Head], layout: WindowLayout | None = None
) -> WindowPolicy:
    """Return the policy of windows for the heads of a model; without a layout, to check them.

    Raises:
        UsageError: if an option does not suit the heads.
    """
    aggregate = _aggregate(options, heads)
    backgrounds = _backgrounds(options, heads) if aggregate in ("max", "noisy_or") else {}
    label = options.background_label
    if label is not None and not backgrounds:
        raise UsageError(
            "--background-label needs an output whose exclusive labels include it, and --aggregate "
            f"max or noisy_or, got {label!r} and {aggregate}.",
            "Give one of the labels, or leave it out.",
        )
    places = layout or WindowLayout(tokens=1, stride=1)
    policy = WindowPolicy(**dict(places), aggregate=aggregate, backgrounds=backgrounds)
    for name, head in heads.items():
        if reason := policy.problem_for(name, head):
            raise UsageError(f"--{reason}.", "Choose another aggregate.")
    return policy


def _aggregate(options: ExportOptions, heads: Mapping[str, Head]) -> Aggregate | None:
    of_documents = [head for head in heads.values() if not head.is_per_token]
    fixed: Aggregate | None = "mean" if of_documents else None
    if any(not isinstance(head, FeatureExtraction) for head in of_documents):
        if options.aggregate is None:
            raise UsageError(
                "--long-documents windows needs --aggregate for labels and values, got none.",
                "Give max or noisy_or if one place in the document decides, mean if all does.",
            )
        return options.aggregate
    if options.aggregate not in (None, fixed):
        raise UsageError(
            f"--aggregate {options.aggregate} is for labels and values of documents, got a model "
            "that has none.",
            "Leave --aggregate out: vectors are the mean, and each token is in one window.",
        )
    return fixed


def _backgrounds(options: ExportOptions, heads: Mapping[str, Head]) -> dict[str, str]:
    found = dict[str, str]()
    for name, head in heads.items():
        if not isinstance(head, SingleLabelClassification):
            continue
        if options.background_label in head.labels:
            found[name] = str(options.background_label)
        elif options.background_label is None and len(head.labels) == 2:
            found[name] = head.labels[0]
    return found


def window_case(
    options: ExportOptions, spec: InputSpec, tokenizer: str | None, engine: Engine
) -> Case:
    """Return the case of a document of a few windows, with the engine's outputs for each.

    Raises:
        UsageError: see ``layout_of``.
    """
    layout = layout_of(options, spec, tokenizer)
    generator = np.random.default_rng(3)
    count = layout.content + 2 * layout.stride + _MORE_TOKENS
    tokens = random_tokens(
        generator, (count,), vocab_size=spec.vocab_size, num_features=spec.num_features
    )
    if layout.prefix or layout.suffix:
        tokens = np.concatenate([layout.prefix, tokens, layout.suffix], dtype=np.int64)
    inputs = with_extras(
        {spec.main: tokens[None], "lengths": np.array([len(tokens)])}, spec, generator
    )
    name = f"{len(Cut(layout, count))} windows"
    return WindowRuns(engine, layout, spec.names, spec.extras).case(name, inputs)
