"""The documents and choices for which a loaded model has evidence."""

from aftexport.errors import InputError
from aftexport.system.contract import largest
from aftserve.model.classifier import Classifier
from aftserve.model.wanted import MAX_EVIDENCE_NUMBERS, Wanted


def check_evidence(classifier: Classifier, wanted: Wanted, tokens: int) -> None:
    """Raise InputError if this engine has no evidence for a document of this length."""
    if not wanted.explained:
        return
    if wanted.numbers != [largest(0)] and not classifier.engine.takes_choice:
        engine, first = classifier.engine.name, classifier.manifest.explained
        raise InputError(
            f"{engine} explains only the largest logit of {first}.",
            "Leave explain out, or serve the bundle with onnxruntime.",
        )
    most = max(1, MAX_EVIDENCE_NUMBERS // tokens)
    if len(wanted.explained) > most:
        raise InputError(
            f"Expected at most {most} labels or values to explain for a document of {tokens} "
            f"tokens, got {len(wanted.explained)}.",
            "Send some of them in each request.",
        )
    plan = classifier.manifest.chunked
    if classifier.in_chunks(tokens) and plan is not None and not plan.evidence:
        raise InputError(
            f"The document has {tokens} tokens and runs in chunks, where this model pools them "
            "in a way that keeps no evidence.",
            f"Send a document of at most {classifier.whole_tokens} tokens.",
        )
