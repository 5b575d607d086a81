"""Weights that are read from files: regions, rearrangements, dtypes, ties, quantised formats."""

from tests.mutants import Mutant

LAZY = "tests/lora_parallel/lazy"
REGIONS = f"{LAZY}/test_lazy_tensor.py::test_a_rearrangement_reads_the_regions_of_the_real_one"
TRACKING = f"{LAZY}/test_tracking.py"
QUANTISED = "tests/lora_parallel/quantised/test_loading.py"
READ = f"{QUANTISED}::test_what_is_read_is_what_a_load_in_memory_gives"

BREAKAGES = [
    Mutant(
        "pass",
        "The part of a fused weight that begins in its middle is read from its beginning.",
        REGIONS,
        """self.parent.pieces(with_part(region, self.dim, _shifted(region[self.dim], self.start)))""",
        """self.parent.pieces(region)""",
    ),
    Mutant(
        "pass",
        "The second of two weights that a model fuses is written over the first.",
        REGIONS,
        """moved = _shifted(piece.target[self.dim], low - wanted.start)""",
        """moved = piece.target[self.dim]""",
    ),
    Mutant(
        "pass",
        "A transposed weight is read in another order of its dims.",
        REGIONS,
        """self.parent.pieces(tuple(region[self.dims.index(dim)] for dim in range(len(self.dims))))""",
        """self.parent.pieces(tuple(region[dim] for dim in self.dims))""",
    ),
    Mutant(
        "pass",
        "The first of a stack of experts is read for each of them.",
        REGIONS,
        """dim, one = self.dim, slice(self.index, self.index + 1)""",
        """dim, one = self.dim, slice(0, 1)""",
    ),
    Mutant(
        "pass",
        "Every rank reads the first rows of a checkpoint of torch DCP.",
        f"{LAZY}/test_files.py::test_a_dcp_directory",
        """offsets = torch.Size(part.start for part in region)""",
        """offsets = torch.Size(0 for part in region)""",
    ),
    Mutant(
        "guard",
        "Weights are read from another file than the index names for them.",
        f"{LAZY}/test_files.py::test_an_index_that_names_another_file_than_the_one",
        """if key not in leaves or leaves[key].source.path.name != Path(name).name:""",
        """if False:""",
    ),
    Mutant(
        "pass",
        "Each chunk of a weight that torchao quantises stays in memory until Python looks for garbage.",
        f"{QUANTISED}::test_no_rank_holds_more_than_a_slice_while_reading",
        """    del part.weight  # torchao""",
        """    # torchao""",
    ),
    Mutant(
        "guard",
        "The bytes of a quantised checkpoint are taken for weights.",
        f"{TRACKING}::test_a_quantised_weight",
        """if wanted.is_floating_point() and leaf.dtype not in _READABLE:""",
        """if False:""",
    ),
    Mutant(
        "guard",
        "One number is read for all elements of a weight, from a file that has changed since the model was built.",
        f"{TRACKING}::test_a_file_that_has_changed_since_the_model_was_built",
        """if block.shape != target.shape:  # copy_ would broadcast""",
        """if False:""",
    ),
    Mutant(
        "guard",
        "A weight is filled with a part of another one, which has another shape.",
        f"{TRACKING}::test_another_shape",
        """if tuple(stored.shape) != tuple(wanted.shape):""",
        """if False:""",
    ),
    Mutant(
        "guard",
        "Weights that were given uninitialised memory train from garbage.",
        f"{TRACKING}::test_memory_that_was_given_since_is_refused",
        """if key in tensors and not tensors[key].is_meta and not hasattr(tensors[key], _GIVEN):""",
        """if False:""",
    ),
    Mutant(
        "pass",
        "A tied head and embedding become two weights, of which one trains alone.",
        f"{TRACKING}::test_a_tie_may_be_in_the_file_under_any_of_its_names",
        """replace_tensor(module, key, tensor)""",
        """replace_tensor(module, key, nn.Parameter(tensor.detach().clone(), tensor.requires_grad))""",
    ),
    Mutant(
        "pass",
        "A head that differs from the embedding in later rows is tied to it.",
        f"{LAZY}/test_lazy_tensor.py::test_equal",
        """torch.equal(read(first.node, part), read(second.node, part)) for part in parts)""",
        """torch.equal(read(first.node, part), read(second.node, part)) for part in parts[:1])""",
    ),
    Mutant(
        "pass",
        "The scales of a double-quantised base lack their mean.",
        "tests/lora_parallel/quantised/test_conversion.py"
        "::test_the_layers_stay_the_quantiser_s_and_their_weights_the_same",
        """quantisation.dequantize_blockwise(state.absmax, state.state2) + state.offset""",
        """quantisation.dequantize_blockwise(state.absmax, state.state2)""",
    ),
    Mutant(
        "pass",
        "The scales of a double-quantised checkpoint lack their mean.",
        f"{READ}[saved-nf4, double-dtype0]",
        """values = values + self.offset.to(device)""",
        """pass""",
    ),
    Mutant(
        "pass",
        "The scales of a base that is double-quantised as it is read are those of other statistics.",
        f"{READ}[llama-nf4, double-dtype0]",
        """offset = absmax.mean()""",
        """offset = absmax.median()""",
    ),
    Mutant(
        "guard",
        "A base whose checkpoint lacks scales computes with those of other blocks.",
        f"{QUANTISED}::test_a_checkpoint_without_all_of_its_scales_is_refused",
        """if state.absmax.numel() != blocks or""",
        """if""",
    ),
    Mutant(
        "guard",
        "A tp rank quantises its slice of the input by the largest value of the slice.",
        f"{QUANTISED}::test_rows_that_are_quantised_as_they_come_are_not_cut",
        """if style.weight == Shard(1) and self._form.attributes.get("act_quant_kwargs") is not None:""",
        """if False:""",
    ),
    Mutant(
        "guard",
        "A 4-bit layer in float64 returns memory that was never written.",
        "tests/lora_parallel/quantised/test_conversion.py::test_float64_is_refused_where_there_is_no_kernel",
        """if fed.dtype == torch.float64:""",
        """if False:""",
    ),
    Mutant(
        "guard",
        "A block of quantised features is cut in two, and dequantised with another's scale.",
        "tests/lora_parallel/quantised/test_conversion.py::test_a_cut_through_a_block_is_refused_with_what_works",
        """if style.weight != Shard(1) or of_rows or self.in_features % (self.block * tp) == 0:""",
        """if True:""",
    ),
    Mutant(
        "guard",
        "A DoRA adapter on a quantised layer computes as plain LoRA.",
        "tests/lora_parallel/quantised/test_conversion.py::test_what_cannot_be_sharded_is_refused_by_name",
        """if variants := getattr(layer, "lora_variant", None):""",
        """if variants := None:""",
    ),
    Mutant(
        "pass",
        "A slice that begins in the middle of a block is quantised with another scale.",
        f"{QUANTISED}::test_each_rank_has_its_shard_of_what_a_load_in_memory_gives",
        """slice(first // self.block * self.block,""",
        """slice(first,""",
    ),
    Mutant(
        "replaced",
        "The transposed weight of a Conv1D is quantised in the other direction.",
        READ,
        """if issubclass(layer.source_cls, Conv1D):""",
        """if False:""",
    ),
]
