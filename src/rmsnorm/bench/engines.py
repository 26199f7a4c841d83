"""Inference engines as peers, where they are installed: ONNX Runtime and OpenVINO.

Both read the tensors of the cell where they lie and run on as many threads as PyTorch. Into an
output that is given both write in place; for a fresh one ONNX Runtime takes memory from its own
arena, which keeps it, and OpenVINO is given a new tensor by each call. The weight is a constant of
the model, as it is when a network is exported.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rmsnorm.bench.grid import Cell
from rmsnorm.bench.limit import Arguments, Candidate

MODULES = {"onnxruntime": ("onnxruntime", "onnx", "numpy"), "openvino": ("openvino", "numpy")}
"""What each engine needs to be timed."""


def installed(name: str) -> bool:
    """Whether the engine ``name`` can be imported.

    Example:
        >>> installed("no_such_engine")
        False
    """
    return all(importlib.util.find_spec(module) for module in MODULES.get(name, (name,)))


class Engines:
    """Makes the peers of a cell, and remembers which an engine cannot do.

    Args:
        eps: the constant beside the mean square.
        enabled: False leaves every engine out.

    Attributes:
        names: the engines that are installed.
        failures: for each engine and dtype, why the first cell that it could not do failed.
    """

    def __init__(self, eps: float, enabled: bool = True) -> None:
        self._eps = eps
        self.names = [name for name in MODULES if enabled and installed(name)]
        self.failures: dict[str, str] = {}

    def candidates(self, cell: Cell, weight: Tensor) -> list[Candidate]:
        """The engines' candidates for a ``forward`` or an ``add`` cell; none for other cells.

        Args:
            cell: the cell.
            weight: ``(d,)``, of the cell's dtype.
        """
        makers: dict[tuple[str, str], Callable[[Cell, Tensor, float], Candidate]] = {
            ("onnxruntime", "forward"): _onnxruntime,
            ("onnxruntime", "add"): _onnxruntime,
            ("openvino", "forward"): _openvino,
        }
        found = []
        for name in self.names:
            make = makers.get((name, cell.kind))
            what = f"{name} {cell.kind} {cell.dtype}"
            if make is None or cell.output == "inplace" or what in self.failures:
                continue
            try:
                found.append(make(cell, weight.detach(), self._eps))
            except Exception as error:  # each engine has exceptions of its own
                reason = str(error).strip().partition("\n")[0] or type(error).__name__
                self.failures[what] = reason
        return found


def _onnxruntime(cell: Cell, weight: Tensor, eps: float) -> Candidate:
    """The engine's own fused operations, under the names that its optimizer gives them."""
    import onnx
    import onnxruntime

    # The contrib operation of the standard domain, older than RMSNormalization of ONNX opset 23 and
    # the only one of the two that has a kernel for bfloat16.
    kind = {"float32": onnx.TensorProto.FLOAT, "bfloat16": onnx.TensorProto.BFLOAT16}[cell.dtype]
    adds = cell.kind == "add"
    inputs, outputs = (["x", "residual"], ["y", "sum"]) if adds else (["x"], ["y"])

    def value(name: str) -> Any:
        return onnx.helper.make_tensor_value_info(name, kind, [cell.rows, cell.d])

    raw = weight.contiguous().view(torch.uint8).numpy().tobytes()
    node = (
        onnx.helper.make_node(
            "SkipSimplifiedLayerNormalization",
            ["x", "residual", "weight"],
            ["y", "", "", "sum"],
            domain="com.microsoft",
            epsilon=eps,
        )
        if adds
        else onnx.helper.make_node(
            "SimplifiedLayerNormalization", ["x", "weight"], ["y"], axis=-1, epsilon=eps
        )
    )
    graph = onnx.helper.make_graph(
        [node],
        "norm",
        [value(name) for name in inputs],
        [value(name) for name in outputs],
        [onnx.helper.make_tensor("weight", kind, [cell.d], raw, raw=True)],
    )
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 4
    # Its threads would spin on while the next candidate is timed.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    given = cell.output == "given"

    def bind(*tensors: Tensor | None) -> Arguments:
        binding = session.io_binding()
        results = (tensors[-1],) if given else ()
        for name, tensor in zip(inputs, tensors, strict=False):
            assert tensor is not None
            binding.bind_input(name, "cpu", 0, kind, list(tensor.shape), tensor.data_ptr())
        for name, out in zip(outputs, results or (None,) * len(outputs), strict=True):
            if out is None:
                binding.bind_output(name, "cpu")
            else:
                binding.bind_output(name, "cpu", 0, kind, list(out.shape), out.data_ptr())
        return binding, results

    def call(binding: Any, results: tuple[Tensor, ...]) -> object:
        session.run_with_iobinding(binding)
        return results or binding

    def as_tensors(results: Any) -> tuple[Tensor, ...]:
        if isinstance(results, tuple):
            return results
        return tuple(torch.utils.dlpack.from_dlpack(one._ortvalue) for one in results.get_outputs())

    return Candidate("onnxruntime torch", call, bind, as_tensors)


def _openvino(cell: Cell, weight: Tensor, eps: float) -> Candidate:
    """The formula in float32, which the engine's CPU plugin turns into one fused operation."""
    import numpy
    import openvino
    from openvino import opset13

    half = cell.dtype == "bfloat16"
    element = openvino.Type.bf16 if half else openvino.Type.f32
    given = opset13.parameter([cell.rows, cell.d], element)
    x = opset13.convert(given, "f32") if half else given
    square = opset13.reduce_mean(opset13.multiply(x, x), numpy.array([-1]), keep_dims=True)
    root = opset13.sqrt(opset13.add(square, opset13.constant(numpy.float32(eps))))
    scaled = opset13.multiply(x, opset13.divide(opset13.constant(numpy.float32(1)), root))
    y = opset13.multiply(opset13.constant(weight.float().numpy()), scaled)
    model = openvino.Model([opset13.convert(y, "bf16") if half else y], [given])
    compiled = openvino.Core().compile_model(
        model,
        "CPU",
        {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "INFERENCE_PRECISION_HINT": "bf16" if half else "f32",
        },
    )
    request = compiled.create_infer_request()

    def view(tensor: Tensor) -> Any:
        if half:
            shape = openvino.Shape(list(tensor.shape))
            return openvino.Tensor(tensor.view(torch.int16).numpy(), shape, element)
        return openvino.Tensor(tensor.numpy(), shared_memory=True)

    def bind(x: Tensor, out: Tensor | None) -> Arguments:
        return view(x), None if out is None else view(out), x, out

    def call(source: Any, target: Any, x: Tensor, out: Tensor | None) -> Tensor:
        if out is None:
            out = torch.empty_like(x)
            target = view(out)
        request.set_input_tensor(0, source)
        request.set_output_tensor(0, target)
        request.infer()
        return out

    return Candidate("openvino torch", call, bind)
