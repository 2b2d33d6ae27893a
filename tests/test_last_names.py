"""Names that public programs import last: they are there, where the original had them."""

import importlib

import pytest

NAMES = """
apex.contrib.multihead_attn.encdec_multihead_attn_func: encdec_attn_func
apex.contrib.multihead_attn.fast_encdec_multihead_attn_func: fast_encdec_attn_func
apex.contrib.multihead_attn.fast_encdec_multihead_attn_norm_add_func: fast_encdec_attn_norm_add_func
apex.contrib.multihead_attn.fast_self_multihead_attn_func: fast_self_attn_func
apex.contrib.multihead_attn.fast_self_multihead_attn_norm_add_func: fast_self_attn_norm_add_func
apex.contrib.multihead_attn.mask_softmax_dropout_func: fast_mask_softmax_dropout_func
apex.contrib.multihead_attn.self_multihead_attn_func: self_attn_func
apex.contrib.nccl_allocator: create_nccl_mem_pool init nccl_mem
apex.contrib.nccl_allocator.nccl_allocator: create_nccl_mem_pool init nccl_mem register_mem_pool
apex.contrib.openfold_triton: AttnBiasJIT AttnNoBiasJIT AttnTri CanSchTriMHA
  LayerNormSmallShapeOptImpl _tuneable_triton_kernels mha sync_triton_auto_tune_cache_across_gpus
apex.contrib.openfold_triton._layer_norm_config_ampere: _auto_tuned_config_ampere
apex.contrib.openfold_triton._layer_norm_config_hopper: _auto_tuned_config_hopper
apex.contrib.openfold_triton.fused_adam_swa: AdamMathType FusedAdamSWA
apex.contrib.openfold_triton.layer_norm: LayerNormSmallShapeOptImpl
apex.contrib.openfold_triton.mha: AttnBiasJIT AttnNoBiasJIT AttnTri CanSchTriMHA disable enable
  is_enabled
apex.transformer.pipeline_parallel.schedules.common: Batch FwdStepFunc LossFunc listify_model
  unwrap_model
apex.transformer.tensor_parallel.data: _check_data_types
apex.transformer.tensor_parallel.random: _set_cuda_rng_state
fmhalib: bwd bwd_nl fwd fwd_nl
"""
LINES = NAMES.replace("\n  ", " ").strip().split("\n")


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.partition(":")[0])
def test_names(line):
    module, _, names = line.partition(": ")
    found = importlib.import_module(module)
    assert [name for name in names.split() if not hasattr(found, name)] == []
