"""The model that a session loads: a path, or a model that is adapted to the session."""

import os
from dataclasses import dataclass
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from aftexport.engines.aft_full_product import use_products
from aftexport.engines.cast_graph import has_bfloat16, widen
from aftexport.engines.explained_input import take_choice
from aftexport.engines.onnxruntime.package import onnxruntime
from aftexport.engines.onnxruntime.providers import PROVIDERS, ExecutionProvider
from aftexport.operators.domain import DOMAIN
from aftexport.operators.kernel_forms import choose_kernels
from aftexport.system.onnx_files import read_model, without_links

_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
_MAX_CONSTANT_BYTES = "optimization.constant_folding_max_output_size_in_bytes"


@dataclass(frozen=True)
class Adaptation:
    """The changes of a model for a session.

    Attributes:
        library: the name of the kernel library; None if there is none. The nodes that the kernels
            do not take run by their bodies.
        takes_choice: whether a file's choice of the logits to explain becomes an input.
        provider: the execution provider whose bodies replace those of the file; None for those of
            the file.
    """

    library: str | None
    takes_choice: bool
    provider: ExecutionProvider | None

    def choose_bodies(self, model: onnx.ModelProto, options: onnxruntime.SessionOptions) -> bool:
        """Give the nodes the names that the kernels take, and the others the provider's bodies.

        Args:
            model: the model, which is changed in place.
            options: the options of the session, which compute constants of any size once.

        Returns:
            Whether the model had such nodes.
        """
        # Forms of new nodes get the names of kernels, and bodies for the provider keep theirs.
        is_cuda = self.library == PROVIDERS["cuda"].library
        has_products = is_cuda and use_products(model, PROVIDERS["cuda"].library)
        if has_products:
            # With the default of 1 GiB, 1.31 computes the weights of a long AFT-full in each run.
            options.add_session_config_entry(_MAX_CONSTANT_BYTES, "0")  # no limit
        is_renamed = self.library is not None and choose_kernels(model, self.library)
        is_rewritten = self.provider is not None and self.provider.adapt(model)
        return has_products or is_renamed or is_rewritten


def session_source(
    model: Path | bytes, options: onnxruntime.SessionOptions, adaptation: Adaptation
) -> str | bytes:
    """Return the path or the serialized model that a session loads.

    Args:
        model: path of ``model.onnx``, or the serialized model.
        options: the options of the session, which get the folder of the weights.
        adaptation: the changes of the model.
    """
    if isinstance(model, Path):
        return _adapted_file(model, options, adaptation)
    # Otherwise the runtime would look for files of weights in the current folder.
    options.add_session_config_entry(_WEIGHTS_FOLDER, os.devnull)
    return _adapted_bytes(model, options, adaptation)


def _adapted_bytes(
    model: bytes, options: onnxruntime.SessionOptions, adaptation: Adaptation
) -> bytes:
    if DOMAIN.encode() not in model:
        return model
    try:
        parsed = onnx.load_from_string(model)
    except DecodeError:
        return model  # the runtime reports the fault of the file more precisely
    return bytes(parsed.SerializeToString()) if adaptation.choose_bodies(parsed, options) else model


def _adapted_file(
    path: Path, options: onnxruntime.SessionOptions, adaptation: Adaptation
) -> str | bytes:
    """Return the path, or the adapted model: in float32 instead of bfloat16, and as asked for."""
    source = _source(path, options)
    try:
        if isinstance(source, str):
            model = onnx.load(source, load_external_data=False)
        else:
            model = onnx.load_from_string(source)
    except (OSError, DecodeError):
        return source  # the runtime reports the fault of the file more precisely
    is_wide = has_bfloat16(model)
    if is_wide:
        model = read_model(path)
        widen(model)
    has_choice = adaptation.takes_choice and take_choice(model)
    has_other_bodies = adaptation.choose_bodies(model, options)
    if not (is_wide or has_choice or has_other_bodies):
        return source
    if isinstance(source, str):
        options.add_session_config_entry(_WEIGHTS_FOLDER, str(path.parent))
    return bytes(model.SerializeToString())


def _source(model: Path, options: onnxruntime.SessionOptions) -> str | bytes:
    """Return the path, or the serialized model if the runtime cannot open the path.

    The runtime only takes paths in UTF-8, and only weights within the model's folder.
    """
    path = str(model)
    try:
        path.encode()
    except UnicodeEncodeError:  # file names on Linux may contain any bytes
        return model.read_bytes()
    try:
        without = without_links(model)
    except (OSError, DecodeError):
        return path  # the runtime reports the fault of the file more precisely
    if without is None:
        return path
    located, folder = without
    options.add_session_config_entry(_WEIGHTS_FOLDER, str(folder))
    return bytes(located.SerializeToString())
