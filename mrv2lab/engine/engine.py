"""The engine: submit requests, step, read tokens. On a laptop's CPU or on a GPU, the same calls."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from mrv2lab.config import DType, EngineConfig, ModelConfig, RunnerName, TransferName
from mrv2lab.engine.async_scheduler import AsyncScheduler
from mrv2lab.engine.core import EngineCore
from mrv2lab.engine.grammar import Grammars
from mrv2lab.engine.graph_report import graph_report
from mrv2lab.engine.options import split_options, threads_for
from mrv2lab.engine.output_processor import OutputProcessor
from mrv2lab.engine.outputs import RequestOutput, RunReport
from mrv2lab.engine.projections import V1Projection, project_mrv2
from mrv2lab.engine.prompt import Prompt, as_prompts
from mrv2lab.engine.rows import rows_of
from mrv2lab.engine.scheduler import Scheduler
from mrv2lab.engine.submit import Intake
from mrv2lab.engine.text import TextStream
from mrv2lab.engine.warm_up import WarmUp
from mrv2lab.engine.worker import Worker
from mrv2lab.engine.workload import Workload
from mrv2lab.model.load import load_model
from mrv2lab.observer import NULL_OBSERVER, Observer
from mrv2lab.protocol import LogitsProcessor, SamplingParams
from mrv2lab.runner import ModelRunner
from mrv2lab.runner_v1 import ModelRunnerV1
from mrv2lab.runtime import make_runtime
from mrv2lab.runtime.cpu import CpuRuntime


class UnknownRequest(KeyError):
    """No request has this id. ``str()`` is the sentence, not its repr."""

    def __str__(self) -> str:
        return str(self.args[0])


class Engine:
    """One model on one device behind one scheduler.

    ``model`` is ``"tiny"`` (shipped), ``"smollm2"``, a preset, a Hugging Face folder, a ``.gguf`` file or a
    :class:`ModelConfig` (seeded random weights). ``runner`` is ``"mrv2"`` or ``"v1"``. ``device`` is ``"auto"``,
    ``"cpu"``, ``"cuda"``. ``transfer`` None is each runner's own: ``uva_pool`` for MRV2, ``barrier`` for V1. Further
    keywords are fields of :class:`CacheConfig`, :class:`SchedulerConfig`, :class:`RunnerConfig` and
    :class:`GraphConfig` (``num_blocks=64``, ``max_num_reqs=8``, ``lag=1``, ``cudagraph_mode="full_and_piecewise"``,
    ...). ``num_blocks=None`` sizes the KV cache by a memory profile; ``config.cache.num_blocks`` is what came of it.
    ``seed`` draws the seeds of requests that give none; under V1, which has none for each, it seeds the generator that
    they share.
    Outputs of the latest ``keep_finished`` finished requests stay in ``requests``. ``logits_processors`` are stages of
    one's own (``protocol.LogitsProcessor``). A request may ask for ``max_logprobs`` log-probabilities a token at most
    (-1 = no limit). ``warm_up`` compiles every kernel beforehand (:meth:`warm_up`); None = only where kernels are
    compiled and graphs are captured or the KV cache is measured. ``progress`` draws bars meanwhile.

    Raises ``ValueError``, ``DeviceMissing`` or ``TritonMissing`` with the remedy for anything that cannot be built.
    """

    def __init__(
        self,
        model: str | Path | ModelConfig = "tiny",
        runner: RunnerName = "mrv2",
        device: str = "auto",
        *,
        dtype: DType | None = None,
        transfer: TransferName | None = None,
        seed: int | None = 0,
        keep_finished: int = 4096,
        logits_processors: Sequence[LogitsProcessor] = (),
        max_logprobs: int = 20,
        warm_up: bool | None = None,
        progress: bool = True,
        observer: Observer = NULL_OBSERVER,
        **options: Any,
    ) -> None:
        if transfer is None:
            transfer = "barrier" if runner == "v1" else "uva_pool"
        cache, scheduler, runner_config, graphs = split_options(
            options, {"runner": runner, "device": device, "transfer": transfer}
        )
        if not isinstance(keep_finished, int) or keep_finished < 0:
            raise ValueError(f"keep_finished must be an integer >= 0, got {keep_finished!r}")
        self._closed = False
        self.rt = make_runtime(runner_config, observer)
        try:
            loaded = load_model(model, dtype=dtype, device=self.rt.device.type)
            if self.rt.backend == "interpret" and loaded.config.dtype == "bfloat16":
                raise ValueError("Triton's interpreter computes bfloat16 wrongly; use dtype='float32', kernels='spec'")
            limit = loaded.config.max_position_embeddings
            if "max_model_len" not in options and scheduler.max_model_len > limit:
                scheduler = dataclasses.replace(scheduler, max_model_len=limit)
            self.config = EngineConfig(loaded.config, cache, scheduler, runner_config, graphs=graphs)
            self.tokenizer = loaded.tokenizer
            self.intake = Intake(loaded.config, max_logprobs, logits_processors)
            if isinstance(self.rt, CpuRuntime):
                self.rt.threads = threads_for(runner_config, loaded.weights)
            self.worker = Worker(self.config, self.rt, loaded.weights, warm_up=warm_up, progress=progress)
            self.config = self.worker.config
        except BaseException:
            self.close()  # its threads would outlive it
            raise
        self._rng = np.random.default_rng(seed)
        if isinstance(self.worker.runner, ModelRunnerV1):
            self.worker.runner.sampler.seed(int(np.random.default_rng(seed).integers(2**63 - 1)))
        self.output_processor = OutputProcessor(keep_finished)
        self._next_number = 0
        self._start()

    def _start(self) -> None:
        kind = AsyncScheduler if self.config.scheduler.async_scheduling else Scheduler
        windows = tuple(group.window for group in self.config.model.kv_groups)
        self.scheduler = kind(self.config.scheduler, self.config.cache, self.config.spec, windows)
        depth = self.config.scheduler.max_concurrent_steps
        is_v1 = self.config.runner.runner == "v1"
        project = V1Projection(self.scheduler.requests) if is_v1 else project_mrv2
        self.grammars = Grammars(self.config.model.vocab_size, self.config.spec.num_speculative_tokens, depth)
        self.core = EngineCore(self.scheduler, self.worker, self.rt.observer, depth, project, self.grammars)
        self.num_steps = 0
        self._broken: BaseException | None = None

    @property
    def requests(self) -> dict[str, RequestOutput]:
        """Unfinished requests and the latest finished ones, by id."""
        return self.output_processor.requests

    @property
    def observer(self) -> Observer:
        """Who is told of spans, marks and gauges."""
        return self.rt.observer

    @observer.setter
    def observer(self, observer: Observer) -> None:
        self.rt.observer = observer
        self.core.observer = observer

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> str:
        """Queue one request; returns its id. Nothing runs until :meth:`step`.

        Raises ``ValueError`` for an empty prompt, a token id outside the vocabulary, prompt + max_tokens over
        max_model_len, the id of an unfinished request, a request that could never fit the KV pool, a grammar that is
        invalid or allows nothing, and wishes that contradict each other; other requests are unharmed.
        """
        self._refuse_if_broken()
        params = params if params is not None else SamplingParams()
        token_ids, text = self.intake.tokens(prompt, self.tokenizer)
        request_id = request_id if request_id is not None else self._next_id()
        request, matcher = self.intake.request(request_id, token_ids, params, self.tokenizer, priority)
        earlier = self.requests.get(request_id)
        if earlier is not None and not earlier.finished:
            raise ValueError(f"request id {request_id!r} is in use; give another one, or none, or abort it first")
        self.scheduler.add_request(request)
        # Drawn for every accepted request and for no refused one, so that others' draws depend on neither.
        seed = int(self._rng.integers(-(2**63), 2**63 - 1))
        if not request.seed_given:
            request.seed = seed
        if matcher is not None:
            self.grammars.add(request, matcher)
        stream = TextStream(self.tokenizer.stream(), params) if self.tokenizer is not None else None
        self.output_processor.add(RequestOutput(request_id, text, token_ids), params, stream, self.num_steps)
        return request_id

    def _next_id(self) -> str:
        while f"r{self._next_number}" in self.requests:
            self._next_number += 1
        return f"r{self._next_number}"

    def abort(self, request_id: str) -> RequestOutput:
        """End a request now, whatever it is doing. Raises ``UnknownRequest`` for an id that is unknown or finished."""
        self._refuse_if_broken()
        output = self.requests.get(request_id)
        if output is None or output.finished:
            why = "was never submitted" if output is None else f"finished already ({output.finish_reason})"
            raise UnknownRequest(f"cannot abort {request_id!r}: it {why}")
        return self.output_processor.end(self.scheduler.abort(request_id), self.num_steps)

    def output(self, request_id: str) -> RequestOutput:
        """The request's outcome so far. Raises ``UnknownRequest``."""
        if request_id not in self.requests:
            raise UnknownRequest(f"no request has the id {request_id!r}")
        return self.requests[request_id]

    # -- running -------------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """One turn of the loop; returns the requests that got tokens or ended, with what is new in them.

        With asynchronous scheduling the first call returns nothing: its step is still in flight. Raises
        ``DeviceError`` where queued work raised. After any error or interrupt in here only :meth:`reset` helps.
        """
        self._refuse_if_broken()
        try:
            with self.worker.turn:
                updates = self.core.step()
            self.num_steps += 1
            outputs = self.output_processor.step(updates, self.core.last_output, self.num_steps)
            for request_id in self.output_processor.ended_by_text:
                self.scheduler.finish(request_id, "stop")
            return outputs
        except BaseException as error:  # an interrupt too: host, device and outputs are out of step
            self._broken = error
            raise

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise RuntimeError("this engine was closed; make a new one")

    def _refuse_if_broken(self) -> None:
        self._refuse_if_closed()
        if self._broken is not None:
            raise RuntimeError(
                f"a step broke off with {type(self._broken).__name__}; engine.reset() drops the unfinished requests "
                "and makes the engine usable again"
            ) from self._broken

    def has_work(self) -> bool:
        """Whether another :meth:`step` would do anything."""
        return self.core.has_work()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Run prompts to their ends, together; outputs in the order of the prompts."""
        many = as_prompts(prompts)
        each = list(params) if isinstance(params, Sequence) else [params] * len(many)
        if len(each) != len(many):
            raise ValueError(f"{len(many)} prompts but {len(each)} sampling params")
        outputs: list[RequestOutput] = []
        try:
            for prompt, one in zip(many, each, strict=True):
                outputs.append(self.requests[self.submit(prompt, one)])
        except ValueError:
            self._abort_all(outputs)
            raise
        while not all(output.finished for output in outputs):
            self.step()
        return outputs

    def _abort_all(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            if not (output.finished or self._closed or self._broken):  # else reset() ends it
                self.abort(output.request_id)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """Text of one request as it comes, whoever makes the steps. Leaving the loop early aborts it."""
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer, so no text comes; read token ids from step()")
        output = self.requests[self.submit(prompt, params)]
        sent = 0
        try:
            while sent < len(output.text) or not output.finished:
                if sent < len(output.text):
                    text, sent = output.text[sent:], len(output.text)
                    yield text
                else:
                    self.step()
        finally:
            self._abort_all([output])

    def run(self, workload: Workload, *, progress: bool = True) -> RunReport:
        """Submit a workload's requests at their steps and run until all have ended.

        Raises ``ValueError`` as :meth:`submit` does; the workload's other requests are aborted then.
        """
        arrivals = list(workload.resolve(self.config.model.vocab_size))
        outputs: dict[str, RequestOutput] = {}
        before, started, began = dataclasses.replace(self.scheduler.stats), self.num_steps, time.perf_counter()
        with tqdm(total=len(arrivals), desc=workload.name, unit="req", disable=not progress) as bar:
            while arrivals or self.has_work():
                while arrivals and arrivals[0].step <= self.num_steps - started:
                    arrival = arrivals.pop(0)
                    assert not isinstance(arrival.prompt, int), "resolve() drew it"
                    try:
                        request_id = self.submit(arrival.prompt, arrival.params, priority=arrival.priority)
                    except ValueError:
                        self._abort_all(outputs.values())
                        raise
                    outputs[request_id] = self.requests[request_id]
                bar.update(sum(output.finished for output in self.step()))
        stats = type(before)(
            **{
                field.name: getattr(self.scheduler.stats, field.name) - getattr(before, field.name)
                for field in dataclasses.fields(before)
            }
        )
        seconds = time.perf_counter() - began
        return RunReport(workload.name, outputs, self.num_steps - started, seconds, stats)

    def warm_up(self, *, progress: bool = True) -> WarmUp:
        """Compile every kernel that a workload may need and allocate what is allocated on first use, by small requests
        that leave nothing behind. Automatic on a GPU where graphs are captured.

        Raises ``RuntimeError`` while requests are unfinished.
        """
        self._refuse_if_broken()
        if self.scheduler.has_unfinished():
            raise RuntimeError(
                f"{len(self.scheduler.requests)} requests are unfinished; run or abort them before warm_up()"
            )
        while self.has_work():  # steps in flight for nobody, and the last message of who is gone
            self.step()
        return self.worker.warm_up(progress=progress)

    # -- looking -------------------------------------------------------------------------------------------------------

    def rows(self) -> pd.DataFrame:
        """The rows in use, one a request: this synchronises, so it is for looking between steps.

        MRV2's are permanent and read from the device; V1's are the batch, in its present order, and the host's: a token
        that it does not know yet is a placeholder, -1. A finished request is still there until the next step.
        """
        self._refuse_if_broken()
        return rows_of(self.rt, self.worker.runner, self._decode)

    def graph_report(self) -> Any:
        """What the graphs cost, how often each was replayed, what was padded, and why steps were eager: MRV2's is a
        :class:`~mrv2lab.engine.graph_report.GraphReport`, V1's its own."""
        runner = self.worker.runner
        if isinstance(runner, ModelRunner):
            return graph_report(self.worker.capture_report, runner.graphs.stats)
        return runner.graph_report()

    def _decode(self, token_ids: list[int]) -> str:
        """Text of known tokens; placeholders, which V1 has, show as ``?``."""
        if self.tokenizer is None:
            return " ".join(map(str, token_ids))
        known = [token for token in token_ids if token >= 0]
        return self.tokenizer.decode(known) + "?" * (len(token_ids) - len(known))

    def reset(self) -> None:
        """Drop every unfinished request and all queued device work; the engine can be used again at once.

        The way out after an interrupted step or a ``DeviceError``. Finished outputs are kept; unfinished ones end with
        the reason ``"abort"``. After a fatal CUDA error only a new process helps.
        """
        self._refuse_if_closed()
        self.output_processor.drop_unfinished()
        self.worker.reset()
        self._start()

    def close(self) -> None:
        """Give back the runtime's worker threads. The engine cannot be used afterwards."""
        self._closed = True
        self.rt.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
