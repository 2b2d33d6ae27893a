"""Names of Apex that are missing: what the errors say, and that the table is true."""

import importlib
import importlib.util
import pathlib
import pickle
import re
import runpy
import subprocess
import sys

import pytest
import torch

import apex
import apex.contrib.bottleneck
import apex.contrib.multihead_attn
import apex.contrib.optimizers
import apex.contrib.sparsity
from apex._upstream import missing as _missing

ROOT = pathlib.Path(__file__).parent.parent
PAGE = ROOT / "docs" / "compatibility.md"
SECTIONS = {
    "Not yet": _missing.NOT_YET,
    "Out of scope": _missing.OUT_OF_SCOPE,
    "Compiled modules": _missing.COMPILED,
}
TABLE = {**_missing.NOT_YET, **_missing.OUT_OF_SCOPE}
USES = TABLE | {name: TABLE.get(part, part) for name, part in _missing.COMPILED.items()}
NOT_YET = [name for name in USES if _missing.COMPILED.get(name, name) in _missing.NOT_YET]

# All modules that Apex had from 2018 on: those at the top level, and those in each package.
MODULES = """
top: _apex_gpu_direct_storage _apex_nccl_allocator amp_C apex apex_C bnp cudnn_gbn_lib
  distributed_adam_cuda distributed_lamb_cuda fast_additive_mask_softmax_dropout fast_bottleneck
  fast_encdec_multihead_attn fast_encdec_multihead_attn_norm_add fast_layer_norm
  fast_mask_softmax_dropout fast_multihead_attn fast_self_multihead_attn
  fast_self_multihead_attn_bias fast_self_multihead_attn_bias_additive_mask
  fast_self_multihead_attn_norm_add fmhalib focal_loss_cuda fused_adam_cuda fused_conv_bias_relu
  fused_dense_cuda fused_index_mul_2d fused_lamb_cuda fused_layer_norm_cuda
  fused_rotary_positional_embedding fused_weight_gradient_mlp_cuda
  generic_scaled_masked_softmax_cuda group_norm_cuda group_norm_v2_cuda mlp_cuda nccl_p2p_cuda
  peer_memory_cuda permutation_search_cuda scaled_masked_softmax_cuda scaled_softmax_cuda
  scaled_upper_triang_masked_softmax_cuda syncbn transducer_joint_cuda transducer_loss_cuda
  xentropy_cuda
apex: RNN _autocast_utils amp contrib distributed_testing fp16_utils fused_dense mlp
  multi_tensor_apply normalization optimizers parallel pyprof reparameterization testing
  transformer
apex.RNN: RNNBackend cells models
apex.amp: __version__ _amp_state _initialize _process_optimizer amp compat frontend handle lists
  opt rnn_compat scaler utils wrap
apex.amp.lists: functional_overrides tensor_overrides torch_overrides
apex.contrib: bottleneck clip_grad conv_bias_relu cudnn_gbn fmha focal_loss gpu_direct_storage
  group_norm groupbn index_mul_2d layer_norm multihead_attn nccl_allocator openfold_triton
  optimizers peer_memory sparsity torchsched transducer xentropy
apex.contrib.bottleneck: bottleneck halo_exchangers
apex.contrib.clip_grad: clip_grad
apex.contrib.conv_bias_relu: conv_bias_relu
apex.contrib.cudnn_gbn: batch_norm
apex.contrib.fmha: fmha
apex.contrib.focal_loss: focal_loss
apex.contrib.group_norm: group_norm
apex.contrib.groupbn: batch_norm
apex.contrib.index_mul_2d: index_mul_2d
apex.contrib.layer_norm: layer_norm
apex.contrib.multihead_attn: encdec_multihead_attn encdec_multihead_attn_func
  fast_encdec_multihead_attn_func fast_encdec_multihead_attn_norm_add_func
  fast_self_multihead_attn_func fast_self_multihead_attn_norm_add_func mask_softmax_dropout_func
  self_multihead_attn self_multihead_attn_func
apex.contrib.nccl_allocator: nccl_allocator
apex.contrib.openfold_triton: fused_adam_swa layer_norm mha
apex.contrib.optimizers: distributed_fused_adam distributed_fused_adam_v2
  distributed_fused_adam_v3 distributed_fused_lamb fp16_optimizer fused_adam fused_lamb
  fused_sgd
apex.contrib.peer_memory: peer_halo_exchanger_1d peer_memory
apex.contrib.sparsity: asp permutation_lib permutation_search_kernels sparse_masklib
apex.contrib.sparsity.permutation_search_kernels: call_permutation_search_kernels channel_swap
  exhaustive_search permutation_utilities
apex.contrib.transducer: _transducer_ref transducer
apex.contrib.xentropy: softmax_xentropy
apex.fp16_utils: fp16_optimizer fp16util fused_weight_norm loss_scaler
apex.fused_dense: fused_dense
apex.mlp: mlp
apex.multi_tensor_apply: multi_tensor_apply
apex.normalization: fused_layer_norm
apex.optimizers: fp16_optimizer fused_adagrad fused_adam fused_lamb fused_mixed_precision_lamb
  fused_novograd fused_sgd
apex.parallel: LARC distributed multiproc optimized_sync_batchnorm
  optimized_sync_batchnorm_kernel sync_batchnorm sync_batchnorm_kernel
apex.pyprof: nvtx parse prof
apex.reparameterization: reparameterization weight_norm
apex.testing: common_utils
apex.transformer: _data _ucc_util amp context enums functional layers log_util microbatches
  parallel_state pipeline_parallel tensor_parallel testing utils
apex.transformer._data: _batchsampler
apex.transformer.amp: grad_scaler
apex.transformer.functional: fused_rope fused_softmax
apex.transformer.layers: layer_norm
apex.transformer.pipeline_parallel: _timers p2p_communication schedules utils
apex.transformer.pipeline_parallel.schedules: common fwd_bwd_no_pipelining
  fwd_bwd_pipelining_without_interleaving
apex.transformer.tensor_parallel: cross_entropy data layers mappings memory random utils
apex.transformer.testing: arguments commons distributed_test_base global_vars standalone_bert
  standalone_gpt standalone_transformer_lm
"""

PEER = (
    f"apex.contrib.peer_memory is not in apex {apex.__version__}; "
    "use torch.distributed.batch_isend_irecv"
)
PYPROF = f"apex.pyprof is not in apex {apex.__version__}; use torch.profiler"


def error_of(statement):
    with pytest.raises((ImportError, AttributeError)) as caught:
        exec(statement, {"apex": apex})
    return caught.value


def test_every_module_of_apex_can_be_imported_or_is_explained():
    silent = []
    for line in re.sub(r"\n +", " ", MODULES).split("\n"):
        package, _, names = line.partition(": ")
        for name in names.split():
            module = name if package == "top" else f"{package}.{name}"
            try:
                importlib.import_module(module)
            except ModuleNotFoundError as error:
                if not any(str(error).endswith(f"; use {use}") for use in USES.values()):
                    silent.append(module)
    assert silent == []


def test_no_name_is_in_two_tables():
    assert len(USES) == sum(map(len, SECTIONS.values()))


@pytest.mark.parametrize("name", USES)
def test_every_way_to_ask_for_a_missing_name_explains(name):
    """Remove the line of a name that has arrived."""
    yet = " yet" if name in NOT_YET else ""
    text = f"{name} is not in apex {apex.__version__}{yet}; use {USES[name]}"
    owner, _, last = name.rpartition(".")
    assert importlib.util.find_spec(name) is None  # an error if its package is missing
    plain = error_of(f"import {name}")
    assert (type(plain), plain.name, str(plain)) == (ModuleNotFoundError, name, text)
    if owner:
        member, attribute = error_of(f"from {owner} import {last}"), error_of(name)
        assert (type(member), member.name, str(member)) == (ImportError, owner, text)  # as Python's
        assert (type(attribute), str(attribute)) == (AttributeError, text)
        assert not hasattr(importlib.import_module(owner), last)


@pytest.mark.parametrize(
    ("statement", "text"),
    [
        ("import apex.contrib.peer_memory", PEER),
        ("import peer_memory_cuda", PEER.replace("apex.contrib.peer_memory", "peer_memory_cuda")),
        ("import apex.pyprof", PYPROF),
        (
            "import fast_multihead_attn",
            f"fast_multihead_attn is not in apex {apex.__version__}; "
            "use apex.contrib.multihead_attn",
        ),
    ],
)
def test_the_whole_text(statement, text):
    assert str(error_of(statement)) == text


@pytest.mark.parametrize(
    "statement",
    [
        "import apex.contrib.peer_memory.models",
        "from apex.contrib.peer_memory import LSTM",
        "from apex.contrib.peer_memory.models import LSTM as Other",
        "__import__('importlib').import_module('.peer_memory', 'apex.contrib')",
        "__import__('importlib').import_module('apex.contrib.peer_memory.models')",
        # imports the parent
        "__import__('importlib.util').util.find_spec('apex.contrib.peer_memory.a')",
    ],
)
def test_what_is_inside_a_missing_package(statement):
    error = error_of(statement)
    assert (type(error), error.name, str(error)) == (
        ModuleNotFoundError,
        "apex.contrib.peer_memory",
        PEER,
    )


def test_what_is_gone_for_good_as_a_program():
    """``python -m apex.pyprof.parse net.sql``."""
    with pytest.raises(ImportError, match=PYPROF):
        runpy.run_module("apex.pyprof.parse", run_name="__main__")


def test_among_others_that_exist():
    assert "register_half is not" in str(error_of("from apex.amp import initialize, register_half"))
    text = str(error_of("from apex.contrib import xentropy, peer_memory"))
    assert "peer_memory is not" in text


def test_pickles_of_missing_classes():
    with pytest.raises(
        ModuleNotFoundError, match="apex.contrib.peer_memory is not in apex .* use torch.distr"
    ):
        pickle.loads(b"capex.contrib.peer_memory.peer_memory\nPeerMemoryPool\n.")


@pytest.mark.parametrize(
    ("statement", "text"),
    [
        ("import apex.nonsense", "No module named 'apex.nonsense'"),
        ("import apex.optimizers.nonsense", "No module named 'apex.optimizers.nonsense'"),
        (
            "from apex.parallel import Nonsense",
            "cannot import name 'Nonsense' from 'apex.parallel'",
        ),
        ("apex.nonsense", "module 'apex' has no attribute 'nonsense'"),
        ("apex.contrib.nonsense", "module 'apex.contrib' has no attribute 'nonsense'"),
        ("import mlp_cuda_nonsense", "No module named 'mlp_cuda_nonsense'"),
    ],
)
def test_other_names_have_pythons_own_errors(statement, text):
    assert str(error_of(statement)).startswith(text)
    assert "is not in apex" not in str(error_of(statement))


def test_the_finder_is_installed_once_and_last():
    """In a new process, because the import system of this one serves the other tests."""
    probe = """
import importlib, sys
before = list(sys.meta_path)
import apex
assert sys.meta_path == [*before, apex._upstream.missing.MissingNames]
importlib.reload(apex)
for name in [name for name in sys.modules if name.partition(".")[0] == "apex"]:
    del sys.modules[name]
try:
    import nonsense
except ModuleNotFoundError:
    assert "apex" not in sys.modules  # the finder has looked at the name alone
try:
    import apex.contrib.peer_memory
except ModuleNotFoundError as error:
    assert "batch_isend_irecv" in str(error)
assert len(sys.meta_path) == len(before) + 1
"""
    subprocess.run([sys.executable, "-c", probe], check=True)


TORCH_NAMES = sorted({name for use in USES.values() for name in re.findall(r"torch\.[\w.]+", use)})


@pytest.mark.parametrize("name", TORCH_NAMES)
def test_what_to_use_is_in_torch(name):
    found, done = torch, "torch"
    for part in name.split(".")[1:]:
        done = f"{done}.{part}"
        if not hasattr(found, part):
            importlib.import_module(done)
        found = getattr(found, part)


@pytest.mark.skipif(not PAGE.exists(), reason="not in a checkout")
@pytest.mark.parametrize("section", SECTIONS)
def test_the_page_has_the_same_table(section):
    _, _, after = PAGE.read_text().partition(f"\n## {section}\n")
    rows = re.findall(r"^\| (`.+?) \| (.+) \|$", after.partition("\n## ")[0], re.MULTILINE)
    uses = {name: use.replace("`", "") for names, use in rows for name in names.split(", ")}
    assert {name.strip("`"): use for name, use in uses.items()} == SECTIONS[section]
