"""Measures what a run will meet: each rank's steps and memory, claims, the link, and the ends of real rounds."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
import time
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch

from hvd_adaptive.algorithm.ledger import round_size
from hvd_adaptive.algorithm.merge_period import capped_mega_batch
from hvd_adaptive.algorithm.micro_batches import multiple
from hvd_adaptive.algorithm.slowdown import Slowdown
from hvd_adaptive.algorithm.speed_model import fit_line
from hvd_adaptive.calibrate.choices import SLOW_EXCHANGE, choose, given_bounds, may_choose, may_cut, settled
from hvd_adaptive.calibrate.file import FORMAT, Calibration, Choice, MergeCalibration, RankCalibration
from hvd_adaptive.calibrate.link import measure_claims, measure_link
from hvd_adaptive.calibrate.memory_ceiling import (
    largest_by_growth,
    largest_fitting,
    largest_on_gpu,
    peak_bytes,
    reset_peak,
    tried,
)
from hvd_adaptive.calibrate.recommend import (
    Recommendation,
    predict,
    predict_fragments,
    recommend_batches,
    recommend_mega_batch,
)
from hvd_adaptive.calibrate.rounds import Rounds, lengthened, play_rounds, synchronous
from hvd_adaptive.comm.protocols import Transport, attempt, take_turns
from hvd_adaptive.comm.threads import LocalTransport
from hvd_adaptive.config import Config
from hvd_adaptive.engine.batches import BatchSource
from hvd_adaptive.engine.merge_codec import SLOW_LINK_CODEC
from hvd_adaptive.engine.start_speeds import StepProbe, Steps
from hvd_adaptive.xmc.data import SparseDataset
from hvd_adaptive.xmc.train_config import TrainConfig
from hvd_adaptive.xmc.trainer import local_step, make_model, make_optimizer

_REPEAT_S = 0.05
# All sizes in turn once more, so often at most: a machine's speed changes from second to second.
_PASSES = 10
_NUM_JITTER_STEPS = 30
# Steps of a round in which all ranks make them together, or of one of a rank alone.
_NUM_STEPS = 25
_SIZES = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)


class Calibrator:
    """Measures with the model, data and options of a run. Construction and :meth:`run` are COLLECTIVE.

    Args:
        config: how ranks share and merge; its strategy is local.
        train: the model and its optimizer.
        data: the training data.
        device: this rank's.
        transport: the world.
        memory_bytes: of the host that this rank's process may grow to, on the CPU; None: not known.
        least_s: seconds that real rounds of each kind take at least, and passes over the batch sizes at most.
        given: names of options that were chosen by hand; where strategy or compression is among them, both stay.
        say: gets a line of progress, on rank 0.
    """

    def __init__(
        self,
        config: Config,
        train: TrainConfig,
        data: SparseDataset,
        *,
        device: torch.device,
        transport: Transport,
        memory_bytes: int | None,
        least_s: float,
        given: Collection[str] = (),
        say: Callable[[str], None],
    ) -> None:
        # What it finds is to be written down.
        self._config = config if config.encodes else dataclasses.replace(config, compression="none")
        self._train = train
        self._data = data
        self._device = device
        self._transport = transport
        self._memory_bytes = memory_bytes
        self._least_s = least_s
        self._given = given
        self._say: Callable[[str], None] = say if transport.rank == 0 else lambda line: None
        self._bounds = given_bounds(config)
        self._work = data.num_nonzeros() if config.work == "nonzeros" else None
        self._work_per_sample = 1.0 if self._work is None else float(self._work.mean())
        self._factors = Slowdown(config.slowdown, world_size=transport.world_size).factors(0.0)

    def run(self) -> tuple[Recommendation, Calibration]:
        """Returns the recommended options and what they follow from, the same on every rank.

        Raises:
            AgreedError: on all ranks, if one sample does not fit into some rank's memory.
        """
        transport = self._transport
        self._say("steps of each rank alone")
        mine = take_turns(transport, "measuring steps", self._measure_rank)
        ranks: list[dict[str, Any]] = transport.allgather_object(mine)
        self._say("claims and the link between the ranks")
        claim_s, claim_p99_s = measure_claims(transport)
        link = measure_link(transport, self._device)
        ceilings = [rank["largest_batch"] for rank in ranks]
        largest = np.array([np.inf if one is None else one for one in ceilings], dtype=np.float64)
        fixed_s = np.array([rank["fixed_s"] for rank in ranks])
        work_s = np.array([rank["per_work_s"] for rank in ranks])
        sample_s = work_s * self._work_per_sample
        chosen = attempt(
            transport,
            lambda: recommend_batches(
                batch_size=self._config.batch_size,
                fixed_s=fixed_s,
                sample_s=sample_s,
                largest=largest,
                dataset_size=len(self._data),
                may_cut=may_cut(self._config),
                min_batch_size=self._config.min_batch_size,
                max_batch_size=self._config.max_batch_size,
            ),
        )
        # From here on as train will get it.
        config = self._config = settled(self._config, chosen)
        if config.micro_batch_size is not None:
            # All steps have as many samples, whatever bounds were given.
            chosen.min_batch_size = config.min_batch_size or chosen.batch_size
            chosen.max_batch_size = config.max_batch_size or chosen.batch_size
        line_s = self._factors * (fixed_s + sample_s * chosen.batch_size)
        lines = (self._factors * fixed_s, self._factors * work_s)

        first_size = capped_mega_batch(config, config.mega_batch_samples, len(self._data), transport.world_size)
        rounds = [self._rounds(chosen, first_size)]
        # An epoch is cut evenly, so real rounds have more or fewer samples than a mega-batch.
        real_round = functools.partial(round_size, 0, dataset_size=len(self._data), unit=config.micro_batch_size or 1)

        def period(last: Rounds, seen: list[Rounds]) -> tuple[int, str | None]:
            return recommend_mega_batch(
                batch_size=chosen.batch_size,
                least=first_size,
                communication_s=last.merge_s + last.control_s,
                samples_per_s=float((chosen.batch_size / (line_s * lengthened(seen, *lines))).sum()),
                share=config.merge_share,
                dataset_size=len(self._data),
            )

        def local(last: Rounds, mega_batch: int, compression: str) -> Choice:
            samples_per_s = predict(
                step_s=line_s * together,
                batch_size=chosen.batch_size,
                mega_batch=real_round(mega_batch=mega_batch),
                merge_s=last.merge_s,
                control_s=last.control_s,
                wait_s=last.wait_s,
            )
            return self._choice("local", compression, mega_batch, samples_per_s)

        def in_fragments(whole: Rounds, choice: Choice, number: int) -> Choice:
            # Fragments hold all rows, where a whole merge may have sent those that were touched.
            sent = max(whole.payload_bytes, whole.model_bytes if choice.compression == "none" else 0)
            samples_per_s = predict_fragments(
                step_s=line_s * together,
                batch_size=chosen.batch_size,
                mega_batch=real_round(mega_batch=choice.mega_batch),
                exchange_s=number * link.latency_s + link.per_byte_s * sent,
                rest_s=max(0.0, whole.merge_s - link.latency_s - link.per_byte_s * whole.payload_bytes),
                control_s=whole.control_s,
                wait_s=whole.wait_s,
            )
            computed = self._choice("local", choice.compression, choice.mega_batch, samples_per_s)
            return dataclasses.replace(computed, merge_fragments=number, source="computed")

        chosen.mega_batch, note = period(rounds[0], rounds)
        if chosen.mega_batch > 1.1 * first_size:
            rounds.append(self._rounds(chosen, chosen.mega_batch))
        together = lengthened(rounds, *lines)
        for rank, ratio, factor in zip(ranks, together, self._factors, strict=True):
            rank |= {"together": float(ratio), "slowdown": float(factor)}
        last = rounds[-1]
        choices = [local(last, chosen.mega_batch, config.compression)]
        whole, notes = {config.compression: last}, {config.compression: note}
        may = functools.partial(may_choose, config, self._given)
        free_codec = may("local", SLOW_LINK_CODEC)
        if free_codec and last.merge_s > SLOW_EXCHANGE * last.round_s:
            coded = whole[SLOW_LINK_CODEC] = self._rounds(chosen, chosen.mega_batch, compression=SLOW_LINK_CODEC)
            mega_batch, notes[SLOW_LINK_CODEC] = period(coded, rounds)
            choices.append(local(coded, mega_batch, SLOW_LINK_CODEC))
        number = last.most_fragments
        # With weights of single rows a model is merged whole.
        if number is not None and not last.weights_rows:
            choices += [
                in_fragments(whole[one.compression], one, number)
                for one in list(choices)
                if may("local", one.compression, number)
            ]
        sync = self._synchronous("sync", chosen)
        choices.append(self._played("sync", sync))
        if free_codec and synchronous(sync, *lines).exchange_s * sync.total("num_steps").max() > SLOW_EXCHANGE * sync.seconds:
            choices.append(self._played("sync", self._synchronous("sync", chosen, SLOW_LINK_CODEC), SLOW_LINK_CODEC))
        horovod = self._synchronous("horovod", chosen)
        choices.append(self._played("horovod", horovod))
        allowed = [choices[0], *(one for one in choices[1:] if may(one.strategy, one.compression, one.merge_fragments))]
        while (best := choose(allowed)).source == "computed":
            # What was only computed has to show it.
            tried = self._rounds(chosen, best.mega_batch, best.compression, best.merge_fragments)
            shown = dataclasses.replace(best, samples_per_s=tried.samples_per_s, source="measured")
            choices[choices.index(best)] = allowed[allowed.index(best)] = shown
        if best.strategy == "local":
            chosen.mega_batch = best.mega_batch
            chosen.notes += [note] if (note := notes[best.compression]) else []
        exchange_s = [link.latency_s + link.per_byte_s * one.payload_bytes for one in rounds]
        local_s = float(np.median([max(0.0, one.merge_s - s) for one, s in zip(rounds, exchange_s, strict=True)]))
        return chosen, Calibration(
            format=FORMAT,
            created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            num_samples=len(self._data),
            work=config.work,
            work_per_sample=self._work_per_sample,
            model_bytes=last.model_bytes,
            claim_s=claim_s,
            claim_p99_s=claim_p99_s,
            versions={"torch": torch.__version__},
            ranks=[RankCalibration(**rank) for rank in ranks],
            link=link,
            merge=MergeCalibration(
                mega_batch=[one.mega_batch for one in rounds],
                payload_bytes=[one.payload_bytes for one in rounds],
                merge_s=[one.merge_s for one in rounds],
                control_s=[one.control_s for one in rounds],
                wait_s=[one.wait_s for one in rounds],
                round_s=[one.round_s for one in rounds],
                local_s=local_s,
            ),
            sync=synchronous(sync, *lines),
            horovod=synchronous(horovod, *lines),
            predicted=best,
            choices=choices,
            bounds=self._bounds,
        )

    def _measure_rank(self) -> dict[str, Any]:
        """Measures this rank's steps over batch sizes and its memory; entries of `RankCalibration`."""
        device, base = self._device, self._config.batch_size
        model = make_model(self._train, self._data, seed=self._config.seed, device=device)
        optimizer = make_optimizer(self._train, model)
        micro = self._config.micro_batch_size
        source = BatchSource(self._data, device, micro_batch_size=micro)
        unit = micro or 1
        sizes = sorted({min(multiple(base * part, unit), max(unit, len(self._data) // unit * unit)) for part in _SIZES})
        repeats: dict[int, list[Steps]] = {}
        peaks: dict[int, int] = {}
        largest: int | None = None

        def step(batch: Any) -> None:
            local_step(model, optimizer, batch)

        with StepProbe(
            model, optimizer, step, source, seed=self._config.seed, rank=self._transport.rank, work=self._work
        ) as probe:

            def measure(size: int) -> bool:
                reset_peak()
                fits, results = tried(device, optimizer, functools.partial(probe.repeat, size, repeat_s=_REPEAT_S))
                if fits:
                    peaks[size], repeats[size] = peak_bytes(), results
                return fits

            too_large = next((size for size in sizes if not measure(size)), None)
            if too_large is not None and micro is None:
                largest = largest_fitting(device, optimizer, probe, below=too_large, above=max(repeats, default=0))
                if not repeats:
                    # Not even an eighth of the batch fits, so the step's line comes from smaller ones.
                    for size in sorted({int(largest * part) for part in _SIZES if part <= 1} - {0}):
                        measure(size)
            end = time.perf_counter() + self._least_s
            for size, results in itertools.chain.from_iterable(repeats.items() for _ in range(_PASSES)):
                if time.perf_counter() > end:
                    break
                results.append(probe.run(results[0].num_steps, size))
            jitter = 0.0
            if repeats:
                middle = min(base, max(repeats))
                steps = [probe.run(1, middle) for _ in range(_NUM_JITTER_STEPS)]
                single = [one.compute_s for one in steps]
                jitter = float(np.std(single) / np.mean(single))
            if micro is not None:
                memory = f"micro-batches of {micro} samples fit, as many as you like"
            elif largest is None and device.type == "cuda":
                largest, memory = largest_on_gpu(device, optimizer, probe, start=sizes[-1], most=len(self._data))
            elif largest is None:
                largest, memory = largest_by_growth(peaks, self._memory_bytes)
            else:
                memory = "measured: larger batches ran out of memory"
        if not repeats:
            what, other = ("one sample", "") if micro is None else (f"a micro-batch of {micro}", "micro_batch_size or ")
            raise RuntimeError(f"{what} does not fit into this rank's memory: use a smaller {other}model")
        work = np.array([np.median([one.work / one.num_steps for one in results]) for results in repeats.values()])
        seconds = np.array([np.median([one.compute_s / one.num_steps for one in results]) for results in repeats.values()])
        fixed_s, per_work_s, fit_error = fit_line(work, seconds)
        # The same steps as a session makes them: batches are loaded beside them, and what they touched is noted.
        alone = dataclasses.replace(self._config, slowdown=None, mega_batch=_NUM_STEPS * base)
        own = lengthened([self._play(alone, transport=LocalTransport())], np.array([fixed_s]), np.array([per_work_s]))
        return {
            "host": self._transport.host,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "threads": torch.get_num_threads(),
            "fixed_s": fixed_s,
            "per_work_s": per_work_s,
            "fit_error": fit_error,
            "jitter": jitter,
            "alone": float(own[0]),
            "memory": memory,
            "largest_batch": largest,
            "batch_size": list(repeats),
            "step_work": work.tolist(),
            "step_s": seconds.tolist(),
        }

    def _play(self, config: Config, *, transport: Transport | None = None) -> Rounds:
        """Trains some real rounds. COLLECTIVE."""
        return play_rounds(
            config, self._train, self._data, device=self._device, transport=transport or self._transport, work=self._work,
            least_s=self._least_s,
        )  # fmt: skip

    def _rounds(
        self, chosen: Recommendation, mega_batch: int, compression: str | None = None, merge_fragments: int | None = None
    ) -> Rounds:
        """Trains rounds of the strategy ``local``. COLLECTIVE."""
        config = self._config
        fragments = merge_fragments or config.merge_fragments
        more = [] if compression in (None, "none") else [compression]
        more += [] if merge_fragments is None else [f"{merge_fragments} fragments"]
        self._say(", ".join([f"rounds of {mega_batch} samples", *map(str, more)]))
        config = dataclasses.replace(
            config,
            min_batch_size=min(chosen.min_batch_size, chosen.batch_size),
            max_batch_size=max(chosen.max_batch_size, chosen.batch_size),
            reference_batch_size=config.reference_batch_size or config.batch_size,
            mega_batch=mega_batch,
            compression=compression or config.compression,
            merge_fragments=fragments,
        )
        return self._play(config)

    def _synchronous(self, strategy: str, chosen: Recommendation, compression: str = "none") -> Rounds:
        """Trains with steps that all ranks make together. COLLECTIVE."""
        self._say(f"steps of {strategy}{'' if compression == 'none' else f', {compression}'}")
        config, batch_size = self._config, chosen.batch_size
        own = {name: getattr(config, name) for name in ("slowdown", "seed", "stall_limit_s", "num_threads")}
        if strategy == "sync":
            own |= {"micro_batch_size": config.micro_batch_size, "compression": compression}
            own |= {name: getattr(chosen, name) for name in self._bounds}
        elif chosen.micro_batch_size is not None:
            # What fits into memory: plain Horovod knows no micro-batches.
            batch_size = chosen.micro_batch_size
        mega_batch = _NUM_STEPS * batch_size * self._transport.world_size
        return self._play(Config(strategy=strategy, batch_size=batch_size, mega_batch=mega_batch, **own))

    def _choice(self, strategy: str, compression: str, mega_batch: int, samples_per_s: float) -> Choice:
        config = self._config
        return Choice(
            strategy=strategy,
            compression=compression,
            merge_fragments=config.merge_fragments if strategy == "local" else 1,
            micro_batch_size=None if strategy == "horovod" else config.micro_batch_size,
            mega_batch=mega_batch,
            samples_per_s=samples_per_s,
        )

    def _played(self, strategy: str, rounds: Rounds, compression: str = "none") -> Choice:
        return self._choice(strategy, compression, rounds.mega_batch, rounds.samples_per_s)
