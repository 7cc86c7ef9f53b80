"""Horovod's optimizer and collectives, intercepted in place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from hvd_adaptive.cluster.host import is_crowded
from hvd_adaptive.comm.horovod_wait import sleeping_wait
from hvd_adaptive.wrap.collective_calls import intercept_collectives, of_optimizer, take_name
from hvd_adaptive.wrap.process_sets import is_over_set
from hvd_adaptive.wrap.reasons import Reason

if TYPE_CHECKING:
    from hvd_adaptive.wrap.wrapped_run import Engine

# Of an optimizer whose gradients Horovod does not exchange: backward passes since its last step, by parameter.
_PASSES = "_hvd_adaptive_passes"


def intercept_horovod(listener: Engine) -> None:
    """Replaces methods of Horovod's optimizer classes, and what waits for a collective, in place.

    Args:
        listener: is told of what happens.
    """
    import horovod.torch as hvd
    from horovod.torch import elastic, mpi_ops, optimizer

    basics = mpi_ops._basics
    initialize = basics.init
    library = mpi_ops.mpi_lib
    own, asleep = library.horovod_torch_wait_and_clear, sleeping_wait(library)
    wait = own

    @functools.wraps(initialize)
    def init(*args: Any, **options: Any) -> None:
        nonlocal wait
        # Horovod ignores a further call, as one that a helper makes on some ranks. After a shutdown it starts anew.
        is_further = basics.is_initialized() and listener.report.is_started
        initialize(*args, **options)
        if is_further:
            return
        wait = asleep if is_crowded(hvd.local_size()) else own
        listener.report.is_spread = hvd.local_size() < hvd.size()
        listener.started(hvd.size(), hvd.rank())

    basics.init = init
    _intercept_optimizer(listener, optimizer._DistributedOptimizer)
    adasum = optimizer._DistributedAdasumOptimizer.__init__

    def adasum_init(self: Any, *args: Any, **options: Any) -> None:
        listener.refuse(Reason.ADASUM)
        adasum(self, *args, **options)
        listener.wrapped(f"DistributedOptimizer ({type(self).__name__}, op=Adasum)")

    optimizer._DistributedAdasumOptimizer.__init__ = adasum_init
    if listener.config.dry_run:
        _count_other_steps(listener, optimizer._DistributedAdasumOptimizer)
    elastic_run = elastic.run

    @functools.wraps(elastic_run)
    def run(*args: Any, **options: Any) -> Any:
        listener.refuse(Reason.ELASTIC)
        return elastic_run(*args, **options)

    elastic.run = run
    join = mpi_ops.mpi_lib.horovod_torch_join
    joins: set[Any] = set()

    def torch_join(*args: Any) -> Any:
        listener.joining()
        handle = join(*args)
        joins.add(handle)
        return handle

    mpi_ops.mpi_lib.horovod_torch_join = torch_join

    def wait_and_clear(handle: Any) -> Any:
        is_join = handle in joins
        result = listener.waited(lambda: wait(handle), "hvd.join()" if is_join else take_name(handle))
        if is_join:
            joins.discard(handle)
            listener.joined()
        return result

    intercept_collectives(listener)
    # The one place where a rank waits for others; all of Horovod's functions look it up in its module.
    library.horovod_torch_wait_and_clear = wait_and_clear


def _count_other_steps(listener: Engine, adasum: Any) -> None:
    """Has the steps of optimizers counted, for the end of a dry run, that exchange nothing by themselves, or by Adasum."""
    step = adasum.step

    @functools.wraps(step)
    def step_(self: Any, closure: Any = None) -> Any:
        result = step(self, closure)
        listener.stepped_alone()
        return result

    def stepped(optimizer: Any, args: Any, options: Any) -> None:
        # Horovod's classes call the step of the class that they wrap.
        if not hasattr(optimizer, "_parameter_names"):
            listener.stepped_alone()

    adasum.step = step_
    register_optimizer_step_post_hook(stepped)


def _intercept_optimizer(listener: Engine, cls: Any) -> None:
    construct, make_hook, synchronize, step = cls.__init__, cls._make_hook, cls.synchronize, cls.step
    set_passes = cls.set_backward_passes_per_step

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        construct(self, *args, **options)
        if is_over_set(self):
            listener.refuse(Reason.PROCESS_SET)
        parameters = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        listener.registered(self, parameters)

    @functools.wraps(set_passes)
    def set_backward_passes_per_step(self: Any, passes: int) -> None:
        set_passes(self, passes)
        listener.passes_set(self)

    @functools.wraps(make_hook)
    def _make_hook(self: Any, parameter: Any) -> Callable[..., None]:
        exchange = make_hook(self, parameter)

        def hook(*gradients: Any) -> None:
            if not listener.accumulated(self):
                of_optimizer(exchange, *gradients)
                return
            # Of gradients that Horovod does not exchange its own checks see nothing. A step that one rank leaves out would hang.
            passes = self.__dict__.setdefault(_PASSES, {})
            passes[parameter] = passes.get(parameter, 0) + 1
            if passes[parameter] > self.backward_passes_per_step:
                raise AssertionError(
                    "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                    "backward_passes_per_step to accumulate gradients locally. Where a GradScaler may leave a step out, call "
                    "optimizer.synchronize() before it."
                )

        return hook

    @functools.wraps(synchronize)
    def synchronize_(self: Any) -> None:
        self.__dict__.pop(_PASSES, None)
        if not listener.synchronize(self, lambda: of_optimizer(synchronize, self)):
            # As Horovod's own has it, which step() looks at.
            self._synchronized = True

    @functools.wraps(step)
    def step_(self: Any, closure: Any = None) -> Any:
        result = step(self, closure)
        if closure is not None and self._handles:
            # Exchanges that the closure's backward has begun, and for which the step has not waited.
            listener.refuse_batch(Reason.CLOSURE)
        listener.stepped(self)
        return result

    @functools.wraps(cls.zero_grad)
    def zero_grad(self: Any, *args: Any, **options: Any) -> None:
        # Horovod's takes no argument, though torch's does; fused optimizers' own take none, or have another default.
        if self._handles or _PASSES in self.__dict__:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition. Where a GradScaler may leave a "
                "step out, call optimizer.synchronize() before it."
            )
        super(self.__class__, self).zero_grad(*args, **options)

    cls.__init__, cls._make_hook, cls.synchronize, cls.step = __init__, _make_hook, synchronize_, step_
    cls.set_backward_passes_per_step, cls.zero_grad = set_backward_passes_per_step, zero_grad
