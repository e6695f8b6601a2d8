"""The way in: a client of one or several routers."""
from __future__ import annotations

import json
import os
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import grpc

from millrace.answer import Answer
from millrace.errors import make_error
from millrace.routers import Routers, Search
from millrace.v1 import inference_pb2 as pb

_SERVICE = "/millrace.v1.InferenceService/"


class Client:
    """Asks the first router that answers, and goes on at the next when one is lost. Any thread.

    addresses: "HOST:PORT", or several of them: routers that serve the same model.
    ca: PEM file of who must have signed the routers' certificates; given, or `credentials`: TLS, else plaintext.
    certificate, key: PEM files of what the client shows, where routers want that.
    credentials: instead of these three.
    token: sent as `authorization: Bearer …` with every call.
    token_file: of the token, instead of it; read again for each call, so that it may be replaced.
    patience: seconds that a call goes on looking for a router after the latest sign of life, before it raises Unavailable.

    `sampling` of generate and chat are the fields of SamplingParams in inference.proto: temperature, max_tokens, stop, n …
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        ca: str | os.PathLike | None = None,
        certificate: str | os.PathLike | None = None,
        key: str | os.PathLike | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        token: str | None = None,
        token_file: str | os.PathLike | None = None,
        patience: float = 30.0,
    ):
        addresses = [addresses] if isinstance(addresses, str) else list(addresses)
        if ca is not None and credentials is None:
            credentials = grpc.ssl_channel_credentials(_read(ca), _read(key), _read(certificate))
        elif ca is not None or certificate is not None or key is not None:
            raise ValueError("ca, certificate and key stand for credentials, and the latter two need ca")
        if token is not None and token_file is not None:
            raise ValueError("token and token_file are both given")
        self._routers = Routers(addresses, credentials, patience)
        self._token, self._token_file = token, token_file

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        model: str = "",
        request_id: str = "",
        cache_salt: str = "",
        tenant: str = "",
        priority: int = 0,
        timeout: float | None = None,
        **sampling: Any,
    ) -> Answer:
        """Continues a text, or the tokens of one. `timeout`: seconds for the whole answer, breaks included."""
        request = pb.GenerateRequest(model=model, request_id=request_id, cache_salt=cache_salt, tenant=tenant, priority=priority)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
        return self._answer(request, timeout, sampling)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        model: str = "",
        request_id: str = "",
        cache_salt: str = "",
        tenant: str = "",
        priority: int = 0,
        timeout: float | None = None,
        **sampling: Any,
    ) -> Answer:
        """Answers messages of the form {"role": …, "content": …}; further keys reach the model's template as they are."""
        request = pb.GenerateRequest(model=model, request_id=request_id, cache_salt=cache_salt, tenant=tenant, priority=priority)
        request.chat.CopyFrom(_chat(messages, tools, template_kwargs, add_generation_prompt))
        return self._answer(request, timeout, sampling)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, timeout: float | None = None, **options: Any) -> list[int]:
        """The prompt that chat would make of these messages. `options`: tools, template_kwargs, add_generation_prompt."""
        options = {"tools": None, "template_kwargs": None, "add_generation_prompt": True, **options}
        request = pb.RenderChatRequest(chat=_chat(messages, **options))
        return list(self._call("RenderChat", request, pb.RenderChatResponse, timeout).token_ids)

    def tokenize(self, text: str, *, add_special_tokens: bool = False, timeout: float | None = None) -> list[int]:
        request = pb.TokenizeRequest(text=text, add_special_tokens=add_special_tokens)
        return list(self._call("Tokenize", request, pb.TokenizeResponse, timeout).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, timeout: float | None = None) -> str:
        request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return self._call("Detokenize", request, pb.DetokenizeResponse, timeout).text

    def models(self, *, timeout: float | None = None) -> list[pb.ModelInfo]:
        return list(self._call("ListModels", pb.ListModelsRequest(), pb.ListModelsResponse, timeout).models)

    def close(self) -> None:
        """Ends all calls."""
        self._routers.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _metadata(self) -> list[tuple[str, str]]:
        token = self._token if self._token_file is None else _read(self._token_file).decode().strip()
        return [("authorization", f"Bearer {token}")] if token else []

    def _answer(self, request: pb.GenerateRequest, timeout: float | None, sampling: Mapping[str, Any]) -> Answer:
        request.sampling.CopyFrom(pb.SamplingParams(**sampling))
        return Answer(Search(self._routers, timeout), request, self._metadata())

    def _call(self, method: str, request, response_class, timeout: float | None):
        search = Search(self._routers, timeout)
        while True:
            call = search.channel().unary_unary(
                _SERVICE + method,
                request_serializer=type(request).SerializeToString,
                response_deserializer=response_class.FromString,
            )
            try:
                response = call(request, timeout=search.time_left(), metadata=self._metadata())
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.UNAVAILABLE and search.failed(time.sleep):
                    continue
                raise make_error(error.code(), error.details() or "") from error
            search.succeeded()
            return response


def _read(path: str | os.PathLike | None) -> bytes | None:
    return None if path is None else pathlib.Path(path).read_bytes()


def _chat(messages, tools, template_kwargs, add_generation_prompt) -> pb.Chat:
    chat = pb.Chat(add_generation_prompt=add_generation_prompt)
    if tools is not None:
        chat.tools_json = json.dumps(list(tools))
    if template_kwargs is not None:
        chat.template_kwargs_json = json.dumps(dict(template_kwargs))
    for message in messages:
        extra = {key: value for key, value in message.items() if key not in ("role", "content")}
        chat.messages.add(
            role=message["role"], content=message.get("content") or "", extra_json=json.dumps(extra) if extra else ""
        )
    return chat
