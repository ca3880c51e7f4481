"""Mirror of kernels/args.h: the same fields in the same order, every one 8 bytes wide."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

INT, REAL, POINTER = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
# How a matrix is stored: in the compute dtype, or as kernels/packed.h expands it.
PLAIN, FP8, FP4 = range(3)


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class Site(ctypes.Structure):
    """Weights of one mHC site and of the norm behind it."""

    _fields_ = _fields(POINTER, "fn base scale norm")


class Matrix(ctypes.Structure):
    """A weight matrix, or a stack of them: addresses of its values and scales, and a kind of those above."""

    _fields_ = [*_fields(POINTER, "values scales"), ("kind", INT)]


class CompressorWeights(ctypes.Structure):
    """Weights of one compressor."""

    _fields_ = _fields(POINTER, "wkv wgate ape norm")


class Layer(ctypes.Structure):
    """Sizes and weights of one block."""

    _fields_ = [
        *_fields(INT, "hidden hc sinkhorn_iterations"),
        *_fields(INT, "heads head_dim rope_pairs q_rank groups o_rank ratio window"),
        *_fields(INT, "index_heads index_dim index_top_k"),
        *_fields(INT, "experts top_k inner shared_inner"),
        *_fields(REAL, "norm_eps hc_eps attn_scale index_scale route_scale swiglu_limit"),
        *_fields(Site, "attn_site ffn_site"),
        *_fields(Matrix, "wq_a wq_b wkv wo_a wo_b"),
        *_fields(POINTER, "q_norm kv_norm sink"),
        *_fields(CompressorWeights, "compressor index_compressor"),
        ("index_wq_b", Matrix),
        *_fields(POINTER, "index_weights gate_weight gate_bias gate_table"),
        *_fields(Matrix, "w13 w2 shared_w1 shared_w2 shared_w3"),
    ]


class Mtp(ctypes.Structure):
    """What an MTP block makes its input of."""

    _fields_ = [*_fields(POINTER, "hnorm enorm"), *_fields(Matrix, "h_proj e_proj"), ("embed", POINTER)]


class Pool(ctypes.Structure):
    """State of one compressor: rings of inputs, and entries found through a block table."""

    _fields_ = [*_fields(POINTER, "kv gate entries table"), *_fields(INT, "cells table_width")]


class State(ctypes.Structure):
    """State of one layer."""

    _fields_ = [("window", POINTER), ("window_cells", INT), *_fields(Pool, "pool index_pool")]


class Tokens(ctypes.Structure):
    """The packed tokens of a forward, and how to run it."""

    _fields_ = [("count", INT), *_fields(POINTER, "ids slots positions cos sin"), *_fields(INT, "is_bf16 threads")]


class Angles(ctypes.Structure):
    """A layer's rotary table."""

    _fields_ = _fields(POINTER, "cos sin")


class Head(ctypes.Structure):
    """From streams to logits."""

    _fields_ = [("site", Site), ("weight", POINTER), ("vocab", INT)]


_ALL = (Site, Matrix, CompressorWeights, Layer, Mtp, Pool, State, Tokens, Angles, Head)
_SIGNATURES: dict[str, Sequence[type]] = {
    "pt_target": (*(POINTER,) * 3, INT, POINTER, POINTER, INT, POINTER, POINTER, INT),
    "pt_mtp": (*(POINTER,) * 5, INT, INT, *(POINTER,) * 3),
    "pt_attention": (POINTER,) * 5,
    "pt_site": (POINTER,) * 7,
    "pt_expand": (POINTER,) * 7,
    "pt_moe": (POINTER,) * 4,
    "pt_logits": (POINTER,) * 5,
    "pt_greedy": (POINTER, POINTER, *(INT,) * 4),
    "pt_uniform": (*(POINTER,) * 4, *(INT,) * 3),
    "pt_linear": (*(POINTER,) * 3, *(INT,) * 5),
    "pt_rms_norm": (*(POINTER,) * 3, INT, INT, REAL, INT),
    "pt_exp": (POINTER, POINTER, INT),
    "pt_profile": (INT,),
}


def declare(library: ctypes.CDLL) -> None:
    """Give every function its argument types.

    Args:
        library: the loaded library.

    Raises:
        AttributeError: a function is missing.
    """
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    library.pt_target.restype = library.pt_mtp.restype = INT
    library.pt_struct_size.argtypes, library.pt_struct_size.restype = (INT,), INT
    library.pt_part_seconds.argtypes, library.pt_part_seconds.restype = (INT,), REAL
    library.pt_part_name.argtypes, library.pt_part_name.restype = (INT,), ctypes.c_char_p
    library.pt_prefers_packed.argtypes, library.pt_prefers_packed.restype = (), INT
    library.pt_instructions.argtypes, library.pt_instructions.restype = (), ctypes.c_char_p


def check_sizes(library: ctypes.CDLL) -> None:
    """Compare every structure's size with the library's.

    Args:
        library: the loaded library.

    Raises:
        ValueError: one differs.
    """
    for index, structure in enumerate(_ALL):
        size = library.pt_struct_size(index)
        if ctypes.sizeof(structure) != size:
            raise ValueError(f"{structure.__name__} has {ctypes.sizeof(structure)} bytes here and {size} there")
