"""Our declaration of ONNX Runtime's C interface against the real header, if present."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

PLUGINS = Path(__file__).parents[2] / "plugins"
PLACES = [
    os.environ.get("ONNXRUNTIME_INCLUDE", ""),
    "/usr/include/onnxruntime",
    "/usr/include/onnxruntime/core/session",
    "/usr/local/include/onnxruntime",
    "/usr/local/include",
]
HEADER = next(
    (place for place in PLACES if place and (Path(place) / "onnxruntime_c_api.h").exists()), None
)

pytestmark = [
    pytest.mark.skipif(
        HEADER is None, reason="no onnxruntime_c_api.h (set ONNXRUNTIME_INCLUDE to its folder)"
    ),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++"),
]

CUSTOM_OP = re.search(
    r"struct CustomOp \{(.*?)\n\};", (PLUGINS / "onnxruntime" / "ort_api.h").read_text(), re.DOTALL
).group(1)
FIELDS = re.findall(r"\(\*(\w+)\)", CUSTOM_OP)

CHECK = r"""
#include <cstddef>
#include <type_traits>
#include "onnxruntime_c_api.h"
#include "ort_api.h"

// An entry is where we say, and takes as many arguments as we say.
template <class R, class... A> constexpr size_t arity(R (*)(A...)) { return sizeof...(A); }
template <class R, class... A> constexpr size_t declared() { return sizeof...(A); }
#define CHECK_ENTRY(name, slot, ...)                                              \
  static_assert(offsetof(OrtApi, name) == slot * sizeof(void*), #name);           \
  static_assert(arity(decltype(OrtApi::name){}) == declared<__VA_ARGS__>(), #name);
namespace ort {
ORT_API_ENTRIES(CHECK_ENTRY)
}

static_assert(ort::kApiVersion <= ORT_API_VERSION);
static_assert(int(ort::ErrorCode::kFail) == ORT_FAIL);
static_assert(int(ort::ErrorCode::kInvalidArgument) == ORT_INVALID_ARGUMENT);
static_assert(int(ort::ElementType::kFloat) == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT);
static_assert(int(ort::ElementType::kInt64) == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64);
static_assert(int(ort::ElementType::kFloat16) == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16);
static_assert(int(ort::ElementType::kBfloat16) == ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16);
static_assert(int(ort::Arity::kRequired) == INPUT_OUTPUT_REQUIRED);
static_assert(int(ort::Arity::kOptional) == INPUT_OUTPUT_OPTIONAL);
static_assert(int(ort::MemoryType::kDefault) == OrtMemTypeDefault);
static_assert(offsetof(ort::ApiBase, GetApi) == offsetof(OrtApiBase, GetApi));
static_assert(offsetof(ort::CustomOp, version) == offsetof(OrtCustomOp, version));
%s
"""


def test_declaration_equals_the_header(tmp_path: Path) -> None:
    assert len(FIELDS) == 25
    fields = "\n".join(
        f'static_assert(offsetof(ort::CustomOp, {f}) == offsetof(OrtCustomOp, {f}), "{f}");'
        for f in FIELDS
    )
    source = tmp_path / "check.cc"
    source.write_text(CHECK % fields)
    command = [
        "g++",
        "-std=c++17",
        "-fsyntax-only",
        f"-I{HEADER}",
        f"-I{PLUGINS / 'onnxruntime'}",
        str(source),
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
