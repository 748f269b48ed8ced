"""Teacher behind a vLLM server: log-probs of sampled tokens and of the most likely tokens, over HTTP.

A response of vLLM with ``prompt_logprobs`` is converted to the columns that a teacher in the job returns, so
the step can use either teacher. Requests run in a thread while the roles of the job compute.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rl.config.sections.teacher_server import TeacherServerConfig
from megatron_rl.distributed.exchange import RowShard
from megatron_rl.megatron.log_probs import TopTokens
from megatron_rl.metrics import Metrics
from megatron_rl.rewards.function import Failure
from megatron_rl.rewards.servers import (
    CIRCUIT_OPEN,
    MALFORMED,
    RATE_LIMITED,
    REQUESTS,
    RETRIES,
    Reply,
    Server,
    secret_headers,
)
from megatron_rl.types import BANNED, Rollouts, split_rows

VALID = "teacher_valid"
"""Name of the column that is true for the rows whose log-probs the server has returned."""
NO_LOG_PROBS = "the teacher's server gave no log-probs"
"""Reason of a row whose request failed."""

MIN_OTHER_PROBABILITY = 1e-6
"""Lower bound of the total probability of all tokens except the most likely tokens. This probability is
computed as a difference from 1, with an error of about 1e-7, and a reverse KL uses its logarithm."""

_BYTES_PER_LOG_PROB = 160
"""Upper bound of the bytes of one log-prob in a response."""


class TeacherResults(NamedTuple):
    """Results of the requests for a batch on one rank. A rank that sends no requests has no rows."""

    shard: RowShard
    """The teacher's columns, and whether each row has them."""
    failures: tuple[Failure, ...] = ()
    """Rows whose requests failed, with the reasons."""
    metrics: Metrics = Metrics()
    """Numbers of requests, retries and failures, each per row."""


class ServedTeacher:
    """Client of a teacher's server.

    ``top_tokens``: request for the most likely tokens of each distribution, or None to omit their columns.
    """

    name = "teacher_server"

    def __init__(self, config: TeacherServerConfig, top_tokens: TopTokens | None, longest_row: int) -> None:
        self.config = config
        self.top_tokens = top_tokens
        log_probs_per_token = 1
        if top_tokens is not None:
            log_probs_per_token += top_tokens.num_tokens
        self._server = Server(
            config,
            config.url.rstrip("/") + "/completions",
            secret_headers(config, config.key_from),
            largest_reply=2**20 + longest_row * log_probs_per_token * _BYTES_PER_LOG_PROB,
        )
        self._executor = ThreadPoolExecutor(1, "teacher")

    def start_requests(self, rollouts: Rollouts, is_sender: bool) -> Future[TeacherResults]:
        """Start the requests for all rows in a thread, and return the future of their results.

        ``is_sender``: whether this rank sends the requests. On the other ranks the results have no rows.
        """
        if is_sender:
            return self._executor.submit(self._request_all, rollouts)
        no_rows: Future[TeacherResults] = Future()
        no_rows.set_result(TeacherResults(self._make_shard(torch.zeros(0, dtype=torch.long), [])))
        return no_rows

    def close(self) -> None:
        """Shut down the thread without waiting for running requests, which end with the process."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _request_all(self, rollouts: Rollouts) -> TeacherResults:
        """Request the log-probs of all rows from the server; return the columns and the failed rows."""
        tokens_by_row = [tokens.tolist() for tokens in split_rows(rollouts.tokens, rollouts.lengths)]
        masks = split_rows(rollouts.response_mask, rollouts.lengths)
        failures: list[Failure] = []

        def read_row(row: int, reply: Reply) -> _RowColumns:
            """Convert the reply for a row to columns; record a failure and return zeros if it is unusable."""
            tokens = tokens_by_row[row]
            row_columns = _RowColumns(len(tokens), self.top_tokens)
            reason = reply.reason
            message = reply.message
            if reason is None:
                problem = row_columns.read_reply(reply, tokens, masks[row])
                if problem is not None:
                    reason = MALFORMED
                    message = problem
            if reason is not None:
                row_columns = _RowColumns(len(tokens), self.top_tokens, valid=False)
                failures.append(Failure(row, reason, f"{self.config.url}: {message}"))
            return row_columns

        columns = self._server.post([self._request_body(tokens) for tokens in tokens_by_row], read_row)
        # Sort the failures, since replies arrive in any order.
        failures.sort(key=lambda failure: failure.row)

        metrics = Metrics.mean("teacher/failed_fraction", len(failures), len(tokens_by_row))
        for name in (REQUESTS, RETRIES, RATE_LIMITED, CIRCUIT_OPEN):
            metrics += Metrics.mean(f"teacher/{name}", float(self._server.counts[name]), len(tokens_by_row))
        return TeacherResults(self._make_shard(rollouts.lengths, columns), tuple(failures), metrics)

    def _request_body(self, tokens: list[int]) -> dict[str, Any]:
        """Return the JSON body of the request for the log-probs of one row's ``tokens``."""
        num_top_tokens = 0
        if self.top_tokens is not None:
            num_top_tokens = self.top_tokens.num_tokens
        # The row is the prompt, whose log-probs are returned. vLLM must generate at least one token.
        return {
            "model": self.config.model,
            "prompt": tokens,
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": num_top_tokens,
        }

    def _make_shard(self, lengths: Tensor, columns: list[_RowColumns]) -> RowShard:
        """Concatenate the ``columns`` of all rows, with ``lengths`` [b] tokens each, into a shard."""
        # Start from empty tensors, which have the right dtype and shape if there are no rows.
        empty_row = _RowColumns(0, self.top_tokens)
        token_columns: dict[str, Tensor] = {}
        for name, empty_tensor in empty_row.tensors.items():
            token_columns[name] = torch.cat([empty_tensor, *(row.tensors[name] for row in columns)])
        valid = torch.tensor([row.valid for row in columns], dtype=torch.bool)
        return RowShard(torch.arange(len(columns)), lengths, token_columns, {VALID: valid})


class _RowColumns:
    """Teacher's outputs for one row of ``length`` tokens: a tensor per column, 0 at tokens of the prompt."""

    def __init__(self, length: int, top_tokens: TopTokens | None, valid: bool = True) -> None:
        self.valid = valid
        self._top_tokens = top_tokens
        self.tensors = {"teacher_log_probs": torch.zeros(length)}
        if top_tokens is not None:
            num_top_tokens = top_tokens.num_tokens
            self.tensors["teacher_top_ids"] = torch.zeros((length, num_top_tokens), dtype=torch.int32)
            self.tensors["teacher_top_log_probs"] = torch.zeros((length, num_top_tokens + 1))

    def read_reply(self, reply: Reply, tokens: list[int], mask: Tensor) -> str | None:
        """Store the log-probs from the server's response in this row's tensors.

        Returns the reason if the response is malformed, and None otherwise. ``tokens``: token ids of the row.
        ``mask``: true for the tokens whose log-probs are stored; the tensors remain 0 at all other tokens.
        """
        try:
            prompt_log_probs = reply.value["choices"][0]["prompt_logprobs"]
            if len(prompt_log_probs) != len(tokens):
                return f"log-probs of {len(prompt_log_probs)} tokens, expected {len(tokens)}"
            for position in mask.nonzero()[:, 0].tolist():
                # The first token of a row has no log-prob.
                if position:
                    self._read_token(position, tokens[position], prompt_log_probs[position])
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            return f"no prompt_logprobs in {reply.value!r:.200} ({error!r:.80})"
        return None

    def _read_token(
        self,
        position: int,
        token: int,
        returned_log_probs: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Store the log-probs at one position; raise ValueError for a number that is not a log-prob.

        ``token``: id of the row's token at ``position``. ``returned_log_probs``: token id as text -> mapping
        with the token's ``logprob``, as the server returned it.
        """
        log_probs = {int(text): float(values["logprob"]) for text, values in returned_log_probs.items()}
        # Validate the numbers of an untrusted server, since the columns are int32 and float32. Rounding can
        # make a log-prob slightly positive.
        if min(log_probs) < 0 or not all(BANNED <= value <= 1e-3 for value in log_probs.values()):
            raise ValueError(f"log-probs {log_probs}")
        self.tensors["teacher_log_probs"][position] = log_probs[token]
        if self._top_tokens is None:
            return

        # Select the most likely tokens. The server also returns the sampled token if it is less likely.
        num_top_tokens, vocab_size = self._top_tokens
        if len(log_probs) < min(num_top_tokens, vocab_size):
            raise ValueError(f"{len(log_probs)} tokens, expected {num_top_tokens}")
        top_ids = sorted(log_probs, key=lambda token_id: -log_probs[token_id])[:num_top_tokens]
        top_ids = [token_id for token_id in top_ids if token_id < vocab_size]
        top_log_probs = [log_probs[token_id] for token_id in top_ids]

        # Pad the columns; the last log-prob is the total of all other tokens.
        other_probability = 1.0 - math.fsum(map(math.exp, top_log_probs))
        num_padding = num_top_tokens - len(top_ids)
        padded_ids = torch.tensor(top_ids + [-1] * num_padding, dtype=torch.int32)
        self.tensors["teacher_top_ids"][position] = padded_ids
        self.tensors["teacher_top_log_probs"][position] = torch.tensor(
            [*top_log_probs, *[BANNED] * num_padding, math.log(max(other_probability, MIN_OTHER_PROBABILITY))]
        )
