"""Compiles the CUDA kernels for real, down to machine code: this needs no device. Run by a test."""

from __future__ import annotations

import itertools
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from paceline.routing.backends import triton_kernels as kernels
from paceline.stand_ins import kernels as stand_in_kernels


def build(kernel: Any, types: list[str], constants: dict[str, Any], warps: int = 4) -> None:
    """Compile for an H100 or H200; types of the arguments that are no constants, in order."""
    rest = iter(types)
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else next(rest) for n in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    assert built.asm["cubin"]


def main() -> None:
    """Every kind of metric, with and without the optional inputs, both widths of keys."""
    for kind, some, key in itertools.product(range(5), (False, True), ("*i32", "*i64")):
        metric = "*fp32" if kind < 2 else "*i64"
        types = ["*i64", "*u8", "*i64", "*i64", "*u8", metric, "*i64", "*i32", key, *["*i32"] * 3]
        flags = dict.fromkeys(("VALID", "POOL", "DECODE", "FILL"), some)
        sizes = {"BLOCK": 32, "SLOTS": 8, "GROUPS": 128, "POOLS": 2}
        constants = {"KIND": kind, "PRIORITY": key == "*i64", **flags, **sizes}
        build(kernels.prepare, types + ["i32"] * 7, constants)
    for fill, key in itertools.product((False, True), ("*i32", "*i64")):
        types = ["*i32", key, "*i32", "*i32", "*i32", "*i64", key, "*i32", "*i64", "*i32"]
        sizes = {"ALONE": fill, "GROUPS": 128, "POOLS": 2, "CHUNK": 2048, "TILE": 32}
        build(kernels.threshold, types + ["i32"] * 6, {"FILL": fill, **sizes}, warps=8)
    for weight in ("*i16", "*i32", "*i64"):
        types = ["*i64", weight, "*i32", "*i32", "*i64", "*i32", "*i64", weight, "*i1"]
        build(kernels.apply, types + ["i32"] * 3, {"BLOCK": 1024})
    sizes = {"OWN": 64, "RANK": 16, "ROWS": 32, "STEP": 64}
    for x in ("*fp32", "*bf16", "*fp16"):
        where = ["*i64", "*i32", "*i32", "*fp32", *["i32"] * 4]
        build(stand_in_kernels.inner, [x, x, "*fp32", *where], sizes)
        build(stand_in_kernels.outer, [x, "*fp32", x, x, *where], sizes)
    for weight, some in itertools.product(("*bf16", "*fp16", "*fp32", "*fp64"), (False, True)):
        types = ["*i64", weight, "*u8", "*i64", "*i64", "*i64", "*i64", "*u8", *["i32"] * 6, "fp32"]
        for most in (2, 512):
            sizes = {"MOST": most, "CHUNK": max(16, min(256, 8192 // most)), "TILE": 4096 // most}
            flags = {"LIMIT": 128.0, "VALID": some, "POOL": some}
            build(kernels.read, types, {**flags, **sizes})
    for weight, some in itertools.product(("*i16", "*i32", "*i64"), (False, True)):
        types = ["*i64", weight, "*u8", "*i64", "*u8", "*i64", weight, "*i1", *["i32"] * 3]
        build(kernels.write_readable, types, {"VALID": some, "POOL": some, "BLOCK": 1024})
    print("all kernels compile")


if __name__ == "__main__":
    main()
