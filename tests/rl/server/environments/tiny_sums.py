"""An environment for `vf-eval` that needs nothing but this machine: two turns of sums, asked by OpenAI's own client."""

import openai
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

__all__ = ["ChatHarness", "SumTaskset"]


class SumData(vf.TaskData):
    """The right answer."""

    answer: int


class SumTask(vf.Task[SumData]):
    """Right where the answer stands in what the model said."""

    @vf.reward(weight=1.0)
    async def is_right(self, trace: vf.Trace) -> float:
        return float(str(self.data.answer) in str(trace.branches[-1].messages[-1].content))


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    """Three sums."""

    def load(self) -> list[SumTask]:
        return [SumTask(SumData(prompt=f"{i} + {i} = ", answer=2 * i), self.config.task) for i in range(1, 4)]


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """Asks for a whole answer, then, behind it, for a streamed one."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> ProgramResult:
        messages = [{"role": "user", "content": data.prompt}]
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            first = await client.chat.completions.create(model=ctx.model, messages=messages)
            messages += [
                {"role": "assistant", "content": first.choices[0].message.content or ""},
                {"role": "user", "content": "again"},
            ]
            options = {"include_usage": True}
            stream = await client.chat.completions.create(
                model=ctx.model, messages=messages, stream=True, stream_options=options
            )
            said = "".join([event.choices[0].delta.content or "" async for event in stream if event.choices])
        return ProgramResult(exit_code=0, stdout=said, stderr="")
