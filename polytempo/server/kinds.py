"""The two generating routes: how each reads its request and writes a choice, streamed or whole."""

from __future__ import annotations

from typing import Any

from polytempo.async_llm import AsyncLLM, RequestStream
from polytempo.errors import RequestError
from polytempo.llm import Prompt
from polytempo.server.answers import LogprobWriter, finish_reason
from polytempo.server.protocol import ChatRequest, CompletionRequest
from polytempo.serving_thread import RequestDelta
from polytempo.types import SamplingParams


class Completion:
    """/v1/completions."""

    id_prefix, object_name, chunk_name = "cmpl", "text_completion", "text_completion"
    prompt_field = "prompt"

    def __init__(self, body: CompletionRequest, front: AsyncLLM) -> None:
        self.body, self.front = body, front
        self.params: SamplingParams = body.params()
        self.prompts: list[Prompt] = body.prompts
        self.drops_output = body.is_scoring
        self._writers: dict[int, LogprobWriter] = {}

    def opening(self, stream: RequestStream, index: int) -> dict[str, Any] | None:
        """What a stream's choice begins with; the echo of a prompt comes with its first delta."""
        return None

    def choice(self, stream: RequestStream, delta: RequestDelta, is_first: bool) -> dict[str, Any]:
        """One choice of a response or of a chunk."""
        text, logprobs = ("" if self.drops_output else delta.text), None
        echoed, echo_logprobs = "", None
        request = stream.rows[delta.index].request
        if is_first and self.body.echo:
            echoed = self.front.llm.tokenizer.decode(request.prompt_token_ids, self.params.skip_special_tokens)
        if delta.logprobs is not None:
            writer = self._writer(delta.index)
            if is_first and self.body.echo:
                echo_logprobs = writer.echo(request.prompt_token_ids, request.prompt_logprobs)
            if not self.drops_output:
                logprobs = writer.completion(delta.token_ids, delta.logprobs)
        return {
            "index": delta.index,
            "text": echoed + text,
            "logprobs": _joined(echo_logprobs, logprobs),
            "finish_reason": finish_reason(delta.finish_reason),
            "stop_reason": delta.stop_reason,
        }

    chunk = choice

    def _writer(self, index: int) -> LogprobWriter:
        llm = self.front.llm
        if index not in self._writers:
            self._writers[index] = LogprobWriter(llm.tokenizer, llm.decode_token, self.params.skip_special_tokens)
        return self._writers[index]


def _joined(first: dict[str, list] | None, second: dict[str, list] | None) -> dict[str, list] | None:
    if first is None or second is None:
        return second if first is None else first
    return {name: first[name] + second[name] for name in first}


class Chat:
    """/v1/chat/completions."""

    id_prefix, object_name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"
    prompt_field = "messages"
    drops_output = False

    def __init__(self, body: ChatRequest, front: AsyncLLM) -> None:
        self.body, self.front = body, front
        self.params: SamplingParams = body.params()
        try:
            ids = front.llm.tokenizer.apply_chat_template(body.conversation)
        except RequestError as error:
            raise RequestError(str(error), param="messages") from None
        self.prompts: list[Prompt] = [{"prompt_token_ids": ids}]

    def opening(self, stream: RequestStream, index: int) -> dict[str, Any] | None:
        """The chunk that names the role."""
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def choice(self, stream: RequestStream, delta: RequestDelta, is_first: bool) -> dict[str, Any]:
        """One choice of a response."""
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        return self._common(delta) | {"message": message}

    def chunk(self, stream: RequestStream, delta: RequestDelta, is_first: bool) -> dict[str, Any]:
        """One choice of a chunk."""
        return self._common(delta) | {"delta": {"content": delta.text} if delta.text else {}}

    def _common(self, delta: RequestDelta) -> dict[str, Any]:
        logprobs = None
        if delta.logprobs is not None:
            llm = self.front.llm
            writer = LogprobWriter(llm.tokenizer, llm.decode_token, self.params.skip_special_tokens)
            logprobs = writer.chat(delta.token_ids, delta.logprobs, self.body.top_logprobs or 0)
        return {
            "index": delta.index,
            "logprobs": logprobs,
            "finish_reason": finish_reason(delta.finish_reason),
            "stop_reason": delta.stop_reason,
        }


Kind = Completion | Chat
