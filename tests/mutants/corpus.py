"""Public reports of gradients that were wrong and raised no error, and the mutant that stands for
each; test_corpus.py holds the two together.

A mutant re-creates the mechanism, not the code. Where one report was about several, or several
were about one, mutants are shared.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Known:
    """A bug that really happened: where it was reported, what it was in a few words, and the
    mutants that re-create it, or why none can where there is a CPU and torch alone.
    """

    where: str
    what: str
    mutants: tuple[str, ...] = ()
    why_not: str = ""


_RESUMING = (
    "what is read and drawn after a restart is the training loop's own doing, not a strategy's"
)
_STREAMS = "CUDA streams: a CPU has none, and work on it is done when a call returns"

CORPUS = (
    # A wrong scale
    Known("DeepSpeed #8154", "divided by accumulation steps twice", ("DividesByTheStepsTwice",)),
    Known("DeepSpeed #5555", "divided by another group's size", ("wrong_divisor",)),
    Known(
        "DeepSpeed #7839", "a loss that was never scaled is unscaled; zero_grad left out",
        ("unscales_what_was_never_scaled", "NeverSetToZero"),
    ),
    Known("DeepSpeed #4957", "one parameter group scaled twice", ("one_parameter_twice",)),
    Known("pytorch #160285", "exactly twice; loss curves look alike", ("doubled_under_adam",)),
    Known(
        "transformers #34191, #34242", "a mean of means, over counts that differ",
        ("MeanOverWhatCounts", "MicroBatchesCountAlike", "means_over_tokens_count_alike"),
    ),
    Known(
        "NeMo-Automodel #3830", "a mean that is one already, times the world",
        ("TimesWorldOnALocalMean",),
    ),
    Known("ms-swift #10081", "the same loss, half the gradient", ("HalfTheDerivative",)),
    Known(
        "pytorch #37359, transformers #608", "ranks with unequal batches count alike",
        ("mean_of_means", "DDPWithoutWeights", "FSDPWithoutWeights"),
    ),
    Known(
        "horovod #2687", "a gradient through a collective is summed, then averaged",
        ("ThroughACollective",),
    ),
    Known("byteps 27b15f6", "the input is divided, not the output", ("divides_the_input",)),
    Known("horovod #2279", "averages become sums for sparse rows", ("sparse_rows_are_summed",)),
    Known("torchtitan #1732", "rescaled at every accumulation", ("RescalesEveryTime",)),
    Known(
        "pytorch #155903", "another divisor on a mesh of two dimensions",
        ("DividesByOneDimension",),
    ),
    # Not exchanged, or among the wrong ranks
    Known("pytorch #104336", "converted after wrapping, hooks lost", ("ConvertedAfterWrapping",)),
    Known("pytorch #12603", "a parameter replaced after wrapping", ("ReplacesAParameter",)),
    Known(
        "x-jxmnop (TrainCheck), kohya #924", "the raw module is called, not the wrapper",
        ("WrapsAndCallsTheRawModule",),
    ),
    Known(
        "verl #7493", "a shard group of one rank switches the exchange off",
        ("nothing_to_shard_nothing_to_sync",),
    ),
    Known("VeOmni #1115", "wrapped with a group of one rank", ("DDPOfOneRank",)),
    Known("Megatron-LM #599, #619", "one layer is never exchanged", ("last_parameter_left_out",)),
    Known("Megatron-LM #1446", "a norm layer differs by rank", ("norm_layers_left_out",)),
    Known("torchtitan #2387", "one submodule is not reduced", ("last_parameter_left_out",)),
    Known(
        "DeepSpeed #4321", "a parameter of exactly the bucket's size is never reduced",
        ("exactly_as_large_as_the_bucket",),
    ),
    Known("DeepSpeed #3832", "too large for the flat buffer", ("larger_than_the_buffer",)),
    Known("DeepSpeed #7660", "buckets by the wrong dtype", ("buckets_by_the_wrong_dtype",)),
    Known("Lightning #11949", "names to ignore lack a prefix", ("ignores_by_half_a_name",)),
    Known(
        "pytorch #128949", "unused for one step, and ranks drift apart",
        ("leaves_alone_what_some_rank_lacks",),
    ),
    Known("pytorch #14675", "a frozen parameter blocks every bucket", ("WaitsForAFrozenOne",)),
    Known("pytorch #109774", "a compiled wrapper goes past the hooks", ("SkipsTheHooks",)),
    Known(
        "Lightning #20340", "unfrozen in the middle of a run",
        ("ListsOnceAndForAll", "HooksWhatTrainsAtFirst"),
    ),
    Known(
        "pytorch #176076", "tied weights in uneven shards: the last part is never updated",
        ("LastPartNeverSent",),
    ),
    Known(
        "Megatron-LM #844", "reduced before the tied embedding's parts are together",
        ("ReducesBeforeTheTie",),
    ),
    Known("torchtitan #3174", "a tied weight counts twice", ("counts_a_tied_weight_twice",)),
    Known("apex 89ae9e5", "the wrong peer in an exchange", ("same_peer_again",)),
    # Stale, or a race
    Known("horovod #363", "reduced before the data was there", ("SendsBeforeItFills",)),
    Known("horovod #358", "the output is read as the input", ("ReadsItsOutput",)),
    Known("DeepSpeed #7898, Megatron-LM #3693", "waits on the wrong stream", why_not=_STREAMS),
    Known("pytorch #37790", "a wrapper beside the default stream", why_not=_STREAMS),
    Known("pytorch #170239", "a stream waits and the host reads early", why_not=_STREAMS),
    Known(
        "pytorch #10800, #38642", "MPI does not wait for the GPU",
        why_not=f"an MPI that reads GPU memory; {_STREAMS}",
    ),
    Known("fairscale #512", "sent before earlier work was done", ("does_not_wait",)),
    Known("Megatron-LM #4609", "a buffer is reused and not zeroed", ("BufferNeverZeroed",)),
    Known("pytorch #115710", "an overflow flag is read before the wait", ("ReadsTheFlagEarly",)),
    # Accumulation
    Known(
        "DeepSpeed #7985", "the last micro-batch comes after the reduction",
        ("AddsTheLastAfterTheSync",),
    ),
    Known("DeepSpeed #6550, #7967", "dropped after micro-step 0", ("KeepsTheFirstOnly",)),
    Known("DeepSpeed #7981", "the last of several backwards counts", ("KeepsTheLastOnly",)),
    Known("torchtitan #3575", "zero_grad at every micro-batch", ("SetsToZeroEveryTime",)),
    Known("pytorch #187732", "no reduction from iteration 2 on", ("stops_after_two_steps",)),
    Known(
        "pytorch #43307", "views of a hook's bucket detach after two iterations",
        ("HookThatDetaches",),
    ),
    Known("horovod #3505", "x - x does not clear an infinity", ("ClearsByItself",)),
    Known("fairscale #784", "a module that is called twice", ("KeepsOneCallOnly",)),
    # Layout, dtype, shape
    Known(
        "pytorch #24836, #192920, #159548", "collectives of strided tensors",
        ("puts_back_in_storage_order",),
    ),
    Known("Megatron-LM #5337", "reduces x.contiguous(), returns x", ("reduces_a_copy",)),
    Known("pytorch #64039", "memory formats mixed", ("mixes_memory_formats",)),
    Known(
        "pytorch #36382", "SyncBatchNorm with unequal batches",
        why_not="torch's SyncBatchNorm takes tensors on a GPU only",
    ),
    Known("pytorch #57077", "the first 64 channels only", ("only_the_first_64_rows",)),
    Known("pytorch #158753", "imaginary parts are zero", ("imaginary_part_is_zero",)),
    Known("pytorch #57410", "a sum in half precision overflows", ("sums_before_it_divides",)),
    Known(
        "horovod #2375", "a buffer of one element is not scaled",
        ("one_element_is_not_divided", "forgets_scalars"),
    ),
    Known("DeepSpeed #8158", "padded parameters overlap", ("padded_parts_overlap",)),
    Known("DeepSpeed #7736", "an empty parameter: 0 / 0", ("empty_parameter_poisons_all",)),
    Known("fairscale #795", "the result of buffer.to() is dropped", ("conversion_dropped",)),
    # Clipping, norms, numbers that are none
    Known(
        "DeepSpeed #1801", "every rank clips by its own norm",
        ("clips_by_a_norm_of_its_own", "clips_before_the_sync", "clips_large_norms_first"),
    ),
    Known("pytorch #149768", "one epsilon per rank", ("EpsilonOfEveryRank",)),
    Known("VeOmni #184", "a norm over replicas too", ("NormOverReplicas",)),
    Known("apex #1512", "clipped before it was unscaled", ("ClipsBeforeUnscaling",)),
    Known("DeepSpeed #7171", "infinity times False", ("zero_times_infinity",)),
    Known("Megatron-LM d668077", "a check for NaN hides the NaN's rank", ("NaNOnRankOne",)),
    # Buffers, optimizer, initial state
    Known("pytorch #63916", "reassigned buffers are not sent", ("BroadcastsOldBuffers",)),
    Known(
        "pytorch #111138", "broadcast_buffers=False leaves out the first one too",
        ("BuffersOfEachRanksOwn",),
    ),
    Known("fairscale #1075", "buffers sent while accumulating", ("BroadcastsBuffersBetween",)),
    Known("accelerate #2665", "an optimizer of other parameters", ("OptimizerOfCopies",)),
    Known("alf #1475", "a network without gradients drifts", ("TargetDrifts",)),
    # Data, random numbers, resuming
    Known("pytorch #31771", "no set_epoch", ("EveryEpochAlike",)),
    Known("Lightning #17713", "no seed: shards overlap", ("OverlappingShards",)),
    Known("accelerate #2694", "the sampler's generator differs", ("GeneratorOfEachRanksOwn",)),
    Known("accelerate #2781", "duplicates in an uneven split", ("SplitsOverlap",)),
    Known(
        "transformers #31412, #37932", "the same masks on every rank",
        ("SeedsAlikeAndStaysAlone",),
    ),
    Known(
        "torchtitan #3008", "resuming after an epoch replays data",
        why_not=_RESUMING,
    ),
    Known(
        "Megatron-LM #2658", "random numbers restored from another rank",
        why_not=_RESUMING,
    ),
    # Hangs and mismatches
    Known("Megatron-LM #2218", "collectives in no fixed order", ("other_way_round_on_one_rank",)),
    Known("Megatron-LM !3918", "a collective of some ranks only", ("one_rank_skips_a_collective",)),
    Known("pytorch #36516", "divided by processes, not replicas", ("TwoReplicasInEachProcess",)),
)  # fmt: skip

# Of no report above: mistakes of tutorials and hand-written code, and what checks and causes need
# beside those.
EXTRAS = frozenset(
    {
        # designs that combine parameters
        "AveragesBeforeTheStep",
        "AveragesNoMomentum",
        "MixesAtEverySecondStep",
        "MixesBeforeTheStep",
        "MixesWithOneHub",
        "MixesWithOneSideOnly",
        "OuterBySums",
        "OuterForgetsItsMomentum",
        "OuterOfEachRank",
        "OuterWithoutNesterov",
        # losses and metrics that exchange by themselves
        "AccuracyOfOwnSamples",
        "AddsWhatAllHave",
        "CenterOfOwnRows",
        "FoldsTwoRanksAlike",
        "GathersNothing",
        "GathersWithoutGradient",
        "LossOfOwnPart",
        "MeanOfAccuracies",
        "OwnRowsAgainstOthers",
        "WeightsTimesWorld",
        # numbers of tokens
        "means_over_tokens_count_by_samples", "OwnTokensDivide", "PaddingDivides",
        "OwnPaddingDivides", "sum_over_tokens_by_ranks", "sum_over_tokens",
        # aliases, guards, results that nobody takes, lists that are not the ones
        "list_of_one_tensor", "guard_that_is_never_true", "result_dropped", "division_dropped",
        "sends_the_list_it_got", "sends_the_sums", "CapturesTheFirstBuffer", "hook_that_sums",
        # rings, remainders, orders
        "ring_passes_on_its_sum", "ring_one_round_short", "ring_of_chunks_one_off",
        "ring_with_a_fixed_peer", "goes_round_the_other_way", "drops_the_remainder",
        "swaps_twins", "another_order_on_each_rank", "unflattens_backwards",
        # some ranks only
        "no_sync", "reduce_without_broadcast", "broadcast_instead_of_mean", "drops_the_last_rank",
        "counts_rank_0_twice", "MeanOfGroupMeans", "WithinTheRowOnly", "one_of_two_gives",
        "two_alone",
        # a server that has no data
        "server_counts_itself", "server_stops_a_rank_early", "server_keeps_the_sum",
        # scale and dtype
        "missing_division", "double_division", "two_are_never_divided", "divides_by_nothing",
        "keeps_what_all_reduce_returns",
        "scale_off_by_two_millionths", "half_precision_wire", "shorter_wire_than_promised",
        "drops_a_rank_on_a_short_wire", "one_percent_on_a_short_wire", "single_precision_wire",
        "a_billionth_too_large",
        "DoubledOnTheWay", "ClimbsItsLoss", "FadesItsLoss",
        # bits
        "multiplies_by_the_reciprocal", "rounds_after_the_sum",
        "divides_after_where_it_promised_before", "adds_in_rank_order",
        "gathers_where_it_promised_to_reduce", "RebuildsItsBuckets",
        "everybody_starts_with_itself", "order_of_arrival",
        # state
        "UsesTheLastStep", "BuildsItsOwnModel", "EveryRankItsOwnModel", "decays_weights_twice",
        "forgets_running_statistics", "ReportsAnotherLoss", "StateEverywhere", "StateNowhere",
        "MomentumLostOnOneRank", "FSDPThatDecays",
        "KeepsItsFirstRate", "MakesOneGroup", "OnlyTheFirstGroup",
        # layouts
        "NormsAreNotSummed", "SumsTheHeadAsWell", "CutsWhereItMustSum", "GateIsNotSummed",
        "ExpertsAreAveraged", "DropsRows",
        "NormalizesOverItsOwnClasses", "MeanOfTheRanksMeans", "AveragesOverContext",
        "ContextCountsFully", "MasksAlike", "MasksOfItsOwn", "CountsEveryReplica",
        "NoSumInBackward", "SharesOfAWholeLayer", "SumInBFloat16", "PartsTheOtherWayRound",
        "BiasOnEveryRank", "AveragesTerms", "SumsBothWays", "SumsAWholeLayer", "DividesAWholeLayer",
        "HalvesOnePiece", "AveragesPieces", "LastBitsOfOneReplica", "ReturnsTwiceTheLoss",
        "MovesAfterTheStep", "NoMeanOverData", "SumOverData", "PairsCountAlike",
        "MeanOverTheOtherAxis", "NeverDividesByMicroBatches", "DividesByMicroBatchesTwice",
        "NothingComesBack", "LosesTheLastMicroBatch", "GradientsOfOtherMicroBatches",
        "ActivationsOfOtherMicroBatches", "KeepsTheLastStepsGradient",
        "ReturnsTheLastMicroBatchsLoss", "TiedAcrossStages", "OneStageIsNotAveraged",
        "ReturnsLogitsWithoutTheirMaximum", "TakesTheLogarithmTwice",
        # process state
        "fills_a_bucket_in_the_order_of_a_set", "fills_a_bucket_in_the_order_of_hashes",
        "chooses_a_bucket_by_hash", "shuffles_by_the_hash_of_a_class",
        "starts_where_the_environment_says", "takes_the_local_rank_for_the_rank",
        "divides_by_the_ranks_of_a_machine",
        # data
        "SameDataOnEveryRank", "ShardedTwice",
        # the built-in workloads that hold one thing each
        "fills_absent_gradients_with_zeros", "SplitsByPosition", "adds_up_a_tied_weight_twice",
        "drops_the_contiguous_copy", "puts_memory_back_by_index", "forgets_what_fills_a_bucket",
        "one_bucket_for_every_dtype", "reduces_the_real_part", "ExchangesAfterTheFirstBackward",
        "hides_infinities", "StepsFromItsOwnBuffer", "keeps_the_first_model",
        "BroadcastsDeadBuffers",
        "RestsAtRateZero", "asks_rank_0_what_there_is", "counts_who_has_something",
        "BucketThatIsNeverFull", "RecomputesItsForward", "ComputesInBFloat16",
        "SendsWeightsAndForgetsBiases", "takes_no_number_for_zero", "drops_what_has_no_finite_norm",
        "flushes_what_is_denormal", "sends_25_mib_at_most", "sends_its_sizes_in_single_precision",
        "every_complex_is_complex64", "takes_equal_for_tied", "knows_one_class_of_parameters",
        "SendsBuffersAsFloats", "exchanges_in_training_mode", "leaves_eval_mode_on",
        "takes_one_storage_for_tied", "TakesAGradientForAccumulation", "NothingAfterAnEvaluation",
        # what --accept must not let through
        "rounded_and_never_divided", "rounded_and_one_percent_off",
        "shorter_than_accepted", "quantized_and_never_divided", "quantized_without_the_last_rank",
        "quantized_and_one_percent_off", "fewer_bits_than_accepted", "LowRankAndNeverDivided",
        "LowRankAndOnePercentOff", "LowRankWithoutTheLastRank", "LowRankNeverOrthogonal",
        "LowRankForgetsTheRest", "MoreDirectionsThanAccepted", "NeverAverages",
        "AveragesAndNeverDivides", "AveragesWithoutTheLastRank", "AveragesSomeParameters",
        "AveragesMoreOften",
        "SendsTheLargestTenth", "SendsScaledSigns", "MemoryIsForgotten",
        "MemoryIsForgottenByAnUnnamedCompressor", "MemoryIsAddedTwice", "MemoryIsReset",
        "MemoryIsThatOfTheMean", "MemoryKeepsWhatIsSent", "MemoryIsAddedAfterCompression",
        "OneElementMore", "LargestBySign", "SparseAndNeverDivided", "OwnSeeds",
        "SignsWithoutMemory", "SignsTakenOutUnscaled", "SignsAddedToTheMemory",
        "SignsTimesTheMaximum", "GridWithoutMemory", "GridWithTheMemoryTwice",
        "RoundsToTheNearest", "RoundsDown", "DrawsFromHalfTheRange",
        # causes that are told apart, and several at once
        "averages_in_a_chain", "one_buffer_for_two", "adds_noise", "AveragesWhatItUpdated",
        "BroadcastsItsInputs", "AugmentsAndNeverDivides", "sums_on_rank_0_alone",
        "two_mistakes_in_two_parameters",
        # micro-batches, owners, pieces
        "AddsUpMeanLosses", "UnpromisedAndALittleOff", "OwnersDoNotDivide",
        "LastParameterNotSentOn", "ClipsByTheLocalNorm", "ReducesToTheNextRank",
        # ends
        "dies_after_the_last_collective", "leaves_quietly", "raises_on_one_rank",
    }
)  # fmt: skip
