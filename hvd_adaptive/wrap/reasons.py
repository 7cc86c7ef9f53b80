"""Why shares stay equal: a closed list, so that ranks can tell each other in bits."""

from __future__ import annotations

import enum


class Reason(enum.Enum):
    """One reason each; the value is what the report says."""

    ADASUM = "op=Adasum combines the ranks' updates by their geometry, which has no weights; the script runs as it is"
    ELASTIC = "hvd.elastic runs the script with a number of ranks that changes; the script runs as it is"
    PROCESS_SET = "an optimizer reduces over a process set, not over all ranks"
    SYNC_BATCH_NORM = "SyncBatchNorm mixes the ranks' gradients before they can be weighted"
    NO_LOADER = (
        "no DataLoader gave the batches of these steps, or it was left before them (next(iter(loader)), list(loader)): there is "
        "nothing whose share could change"
    )
    JOIN = "the script calls hvd.join(), for ranks whose numbers of batches may differ"
    ITERABLE = "an IterableDataset makes its own batches: its samples have no numbers that another rank could take"
    NO_BATCHING = "batch_size=None: the dataset makes its own batches"
    NO_SAMPLER = (
        "its sampler does not split the data by rank (num_replicas and rank, as DistributedSampler has them), so which "
        "samples belong to other ranks cannot be known"
    )
    NOT_COPYABLE = "its sampler cannot be copied to find out which samples the other ranks draw"
    NO_LISTS = "its batch sampler gives neither lists, tuples, arrays nor tensors of sample numbers"
    OUT_OF_ORDER = "in_order=False delivers batches in another order than they were asked for"
    UNION = (
        "the ranks do not draw from one order of one dataset (other lengths, seeds or epochs, or random numbers of their "
        "own), so their batches cannot be pooled"
    )
    UNEVEN = (
        "its sampler gives the ranks batches of different lengths, so that a sample of a short one counts more; pooled, all "
        "would count alike"
    )
    DATASET = (
        "its data set differs between ranks (split by rank, or at random without a seed, or written to), so a sample's number "
        "means another sample on another rank"
    )
    FETCHED_AHEAD = "the script fetches batches ahead of computing on them, skips some, or takes several for one backward"
    INTERLEAVED = "batches of several loaders go into one step"
    OUT_OF_STEP = "the ranks are at different batches of their loaders"
    SUB_BATCHES = "the script cuts its batches into pieces before the forward, whose number would differ between ranks"
    OTHER_INPUT = "a forward or a loss gets a tensor as long as the batch that was not made from it; it may have a fixed size"
    UNSEEN = "the size of the batch cannot be seen in the forward's arguments"
    NO_FORWARD = "no forward of a module that has the optimizer's parameters was seen between batch and backward"
    SUM_LOSS = (
        "a loss is a sum over samples (reduction='sum') that other shares may change: within a forward, beside a loss that is a "
        "mean, scaled by a number that may count samples, or with --strategy local"
    )
    NONE_LOSS = "a loss with reduction='none' is reduced by the script, which may not be a mean over samples"
    WEIGHTED_LOSS = (
        "a loss weighs targets (class weights, ignore_index, a mask), and it cannot be followed whose sample's each is (a "
        "collate_fn may sort them), or what the loss is multiplied by"
    )
    SELECTED = "the loss uses only some of the batch's samples, or uses them in another order (a mask, hard examples, pairs)"
    MIXED = (
        "the loss is not clearly a mean over samples, each by itself: it may compare samples, or divide by what depends on them"
    )
    UNKNOWN_LOSS = "it cannot be seen where the loss of backward() comes from"
    OTHER_LOSS = (
        "the script now computes another loss than in its first steps, or has frozen or unfrozen parameters; only the first "
        "steps are checked closely"
    )
    SIZE_DECIDES = (
        "the script decides by the number of samples in a batch, or by a count of samples (to skip a short batch, to validate): "
        "ranks with other sizes would decide differently"
    )
    NUMBERED = "the script takes samples of a batch by their numbers, up to the last one, which a smaller batch does not have"
    GATHERED = (
        "the script exchanges a value for each sample with the other ranks in a step, a loss before backward(), or something "
        "within a forward"
    )
    SKIPPED = "the script skipped batches whose shares were unequal"
    COMPILED = (
        "torch.compile: compiled code cannot be inspected, and would be compiled again for other batch sizes; for a compiled "
        "module that the script calls itself, --micro-batch-size M avoids both"
    )
    GRAPHED = (
        "CUDA graphs: what the script has captured (torch.cuda.make_graphed_callables, CUDAGraph.replay) has one batch size"
    )
    MICRO_RESULT = (
        "the compiled module's result holds something that is neither a row for each sample nor one number, so it cannot be put "
        "together from micro-batches"
    )
    SCRIPTED = "a TorchScript module cannot be inspected"
    FIXED_SIZE = (
        "a forward makes or reshapes a tensor for the script's batch size, without asking how many samples there are"
    )
    SHAPES = "its batches have samples of different shapes, and its collate_fn cannot stack samples of two of them"
    KINDS = "its batch sampler makes batches of one kind each (a task, a language, a length), which must not be mixed"
    KEPT = "the script keeps its batches, and may train on them again: the shares of other ranks then are not known"
    HELD = (
        "the script keeps values of the rank's own samples (by their numbers, in a queue, as a moving mean), or changes "
        "gradients by them, and trains with that: with other shares they would be values of other samples"
    )
    RATES = "the ranks' learning rates differ: the script may set them on some ranks only, or by samples that a rank saw"
    DROPPED = "its collate_fn leaves out samples, so that a batch may hold fewer than its weight is for"
    CLIPPED = (
        "the script changes gradients before Horovod has averaged them (to clip them, it should call optimizer.synchronize() "
        "first): the result depends on the ranks' shares, and if Horovod averages them just then, the ranks' models drift apart, "
        "also without hvd-adaptive"
    )
    COLLATED = (
        "its collate_fn makes a sample's part of a batch of the others, too (mixup, negatives, statistics of the batch), which "
        "depends on the ranks' shares"
    )
    FREQUENCY = (
        "an embedding with scale_grad_by_freq=True or max_norm changes a row's gradient or the row by what a rank's batch has of "
        "it, which depends on the ranks' shares"
    )
    OWN_GRADIENTS = (
        "the script uses gradients of the rank's own batch before Horovod has averaged any: it moves the model by them, or takes "
        "them by torch.autograd.grad"
    )
    CLOSURE = (
        "the script calls step(closure): Horovod exchanges gradients before the closure computes them, so the ranks' models "
        "drift apart, also without hvd-adaptive"
    )
    UNEXCHANGED = (
        "the script trains parameters whose gradients no wrapped optimizer exchanges: it reduces them by hand or not at all, "
        "without the weights of unequal shares"
    )
    NOT_FOLLOWED = "a batch could not be followed through the script"
    HIDDEN_LOSS = (
        "whether the loss leaves out targets (ignore_index) cannot be seen: it is computed within torch.utils.checkpoint, or "
        "under hooks for saved tensors"
    )

    @property
    def bit(self) -> int:
        """Its bit in a mask of reasons."""
        return 1 << list(Reason).index(self)


# What was found beside a reason because of it, and is not told with it.
_EFFECTS = {
    Reason.CLOSURE: {Reason.OWN_GRADIENTS, Reason.FETCHED_AHEAD},
    Reason.FETCHED_AHEAD: {Reason.OTHER_INPUT, Reason.UNSEEN},
    Reason.INTERLEAVED: {Reason.OTHER_INPUT, Reason.UNSEEN},
}


def told(reasons: set[Reason]) -> list[Reason]:
    """Returns what a report says of reasons, in their order."""
    effects = {effect for reason in reasons for effect in _EFFECTS.get(reason, ())}
    return sorted(reasons - effects, key=lambda reason: reason.bit)


def mask(reasons: set[Reason]) -> int:
    """Returns a set of reasons as bits; fits a float64 exactly."""
    return sum(reason.bit for reason in reasons)


def unmask(bits: int) -> set[Reason]:
    """Returns the reasons behind bits."""
    return {reason for reason in Reason if bits & reason.bit}
