"""The notes on unexpected properties of an export."""

from aftexport.chunked.softmax_attention import count_softmax_attention
from aftexport.pipeline.traced_model import TracedModel
from aftexport.pipeline.value_ranges import MAX_FLOAT16


def export_notes(traced: TracedModel, *, batching: bool) -> list[str]:
    """Return notes on unexpected properties of the export, one sentence each."""
    notes = []
    if not batching:
        notes.append("Each document runs separately (--no-batching).")
    if traced.left_out:
        notes.append(
            f"Left out, at its default: {', '.join(traced.left_out)}. The model is exported for "
            "documents without padding."
            if "lengths" not in traced.spec.names
            else f"Left out, at its default: {', '.join(traced.left_out)}. Only lengths marks the "
            "padding."
        )
    if traced.is_of_onnx:
        notes += _notes_of_onnx(traced)
    elif traced.why_not_float64:
        notes.append(
            f"PyTorch ran in {traced.reference}, because the model's forward does not run in "
            f"float64 ({traced.why_not_float64}). So every error includes PyTorch's rounding."
        )
    if traced.precision == "fp16" and traced.spec.max_tokens == MAX_FLOAT16:
        notes.append(
            f"Documents of more than {MAX_FLOAT16} tokens were not compared, because their cost is "
            "too high or the model's own positions are in 16 bits. So they are refused."
        )
    if count := count_softmax_attention(traced.lowered):
        notes.append(
            f"Softmax attentions run in standard operators (here {count}): their time grows with "
            "the square of the tokens, and their memory too, unless they run in blocks."
            + (
                " The server accepts documents of any length: give --max-length."
                if traced.spec.max_tokens is None
                else ""
            )
        )
    return notes


def _notes_of_onnx(traced: TracedModel) -> list[str]:
    reason = f" ({traced.why_not_float64})" if traced.why_not_float64 else ""
    notes = [
        "There is no PyTorch to compare with: the reference is the ONNX file itself, run by ONNX "
        f"Runtime in {traced.reference}{reason}."
    ]
    if "lengths" not in traced.spec.names:
        notes.append(
            "The file takes neither lengths nor attention_mask: documents of different lengths do "
            "not share a run."
        )
    for old, new in traced.renamed.items():
        notes.append(
            f"The output {old!r} has the name {new!r} in the bundle."
            if new
            else f"The output {old!r} is left out: it holds no floating-point numbers."
        )
    return notes
