"""AsyncStreams: many coroutines, one engine."""

import asyncio
from collections.abc import AsyncIterator

from paged_jax.engine import LLM
from paged_jax.inputs import Prompt
from paged_jax.outputs import RequestOutput
from paged_jax.sampling_params import SamplingParams


class AsyncStreams:
    """The asynchronous twin of LLM.stream: requests of many coroutines share the engine's steps.

    A step runs in a thread while the event loop goes on; requests come and go between steps. All streams of an engine
    must use one object, in one event loop, and nothing else may drive the engine meanwhile.

    Example:
        >>> streams = AsyncStreams(llm)
        >>> async for output in streams.stream("id 1", "Hello", SamplingParams()):
        ...     print(output.outputs[0].text)
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._queues: dict[str, asyncio.Queue[RequestOutput | BaseException]] = {}
        self._engine = asyncio.Lock()
        self._pump: asyncio.Task[None] | None = None

    async def stream(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> AsyncIterator[RequestOutput]:
        """Yields what the request has as soon as it has it, like LLM.stream. Ending the iteration early drops it.

        Raises:
            ValueError, TypeError: as LLM.add_request. What a step raises, every unfinished stream raises.
        """
        async with self._engine:
            self._llm.add_request(request_id, prompt, params, priority=priority)
            queue = self._queues[request_id] = asyncio.Queue()
        if self._pump is None or self._pump.done():
            self._pump = asyncio.create_task(self._run())
        is_finished = False
        try:
            while not is_finished:
                output = await queue.get()
                if isinstance(output, BaseException):
                    raise output
                is_finished = output.finished
                yield output
        finally:
            if self._queues.get(request_id) is queue:  # another stream may have the id of one that has ended
                del self._queues[request_id]
            if not is_finished:
                async with self._engine:
                    self._llm.abort(request_id)

    async def _run(self) -> None:
        """Steps until nothing is unfinished."""
        while self._queues:
            async with self._engine:
                try:
                    outputs = await asyncio.to_thread(self._llm.step)
                except BaseException as error:
                    self._llm.abort_all()
                    for queue in self._queues.values():
                        queue.put_nowait(error)
                    return
            for output in outputs:
                if output.request_id in self._queues:
                    self._queues[output.request_id].put_nowait(output)
            await asyncio.sleep(0)  # let those run who wait for the engine
            if not self._llm.has_unfinished_requests():
                return
