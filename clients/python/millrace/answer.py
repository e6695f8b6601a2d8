"""One answer as it comes, and how it goes on at another router when its own is lost."""
from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator, Sequence

import grpc

from millrace.errors import make_error
from millrace.routers import Search
from millrace.v1 import inference_pb2 as pb

_METHOD = "/millrace.v1.InferenceService/Generate"


class Answer(Iterator[pb.GenerateResponse]):
    """Iterates over the pieces of all choices; ends after the last Finish, or raises an Error.

    `token_ids` and `finish` hold what has come, by choice. One thread iterates; any may cancel.
    """

    def __init__(self, search: Search, request: pb.GenerateRequest, metadata: Sequence[tuple[str, str]]):
        self._search = search
        self._request = request
        self._metadata = metadata
        if not request.sampling.HasField("seed"):  # known from the start, so that any router can go on
            request.sampling.seed = secrets.randbits(64)
        num_choices = request.sampling.n if request.sampling.HasField("n") else 1
        self.token_ids: list[list[int]] = [[] for _ in range(max(0, num_choices))]
        self.finish: list[pb.Finish | None] = [None for _ in self.token_ids]
        self.resumed = 0  # times that it went on after a break
        self._prompt_logprobs = 0
        self._call = None
        self._fresh = True  # nothing has come of this call
        self._lock = threading.Lock()
        self._cancelled = threading.Event()
        self._ended = False

    def __next__(self) -> pb.GenerateResponse:
        while not self._ended:
            try:
                if self._call is None:
                    self._start()
                piece = next(self._call)
            except StopIteration:
                self._ended = True
                break
            except grpc.RpcError as error:
                self._break(error)
                continue
            self._take(piece)
            return piece
        raise StopIteration

    def read(self) -> str:
        """Reads to the end; the text of choice 0 that was left."""
        return "".join(piece.text for piece in self if piece.index == 0)

    def cancel(self) -> None:
        """Frees what the answer holds at the router. Iterating then raises Cancelled, unless the end had come."""
        with self._lock:
            self._cancelled.set()
            if self._call is not None:
                self._call.cancel()

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_) -> None:
        if not self._ended:
            self.cancel()

    def _start(self) -> None:
        call = self._search.channel().unary_stream(
            _METHOD, request_serializer=pb.GenerateRequest.SerializeToString, response_deserializer=pb.GenerateResponse.FromString
        )(self._resumed_request(), timeout=self._search.time_left(), metadata=self._metadata)
        with self._lock:
            self._call, self._fresh = call, True
            if self._cancelled.is_set():
                call.cancel()

    def _resumed_request(self) -> pb.GenerateRequest:
        """The request, with what has come of it. The protocol is exact: what has come does not come again."""
        if not self._prompt_logprobs and not any(self.token_ids):
            return self._request
        request = pb.GenerateRequest()
        request.CopyFrom(self._request)
        for index, token_ids in enumerate(self.token_ids):
            if self.finish[index] is not None:
                request.resume.add(finished=True)
            else:
                request.resume.add(token_ids=token_ids, prompt_logprobs=self._prompt_logprobs if index == 0 else 0)
        return request

    def _take(self, piece: pb.GenerateResponse) -> None:
        if self._fresh:
            self._fresh = False
            self._search.succeeded()
        self.token_ids[piece.index].extend(piece.token_ids)
        self._prompt_logprobs += len(piece.prompt_logprobs)
        if piece.HasField("finish"):
            self.finish[piece.index] = piece.finish

    def _break(self, error: grpc.RpcError) -> None:
        """Prepares for the next router, or raises."""
        code, message = error.code(), error.details() or ""
        if self._may_go_on(code) and self._search.failed(self._cancelled.wait):
            self.resumed += any(map(bool, self.token_ids))
            with self._lock:
                self._call = None
            return
        self._ended = True
        if self._cancelled.is_set():
            code, message = grpc.StatusCode.CANCELLED, "cancelled by the client"
        raise make_error(code, message) from error

    def _may_go_on(self, code: grpc.StatusCode) -> bool:
        if self._cancelled.is_set():
            return False
        if code == grpc.StatusCode.UNAVAILABLE:
            return True
        # A router that is asked to go on may be full for a moment, or not have noticed yet that the broken call is over.
        resuming = self._fresh and any(self.token_ids)
        return resuming and code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.ALREADY_EXISTS)
