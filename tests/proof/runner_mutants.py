"""Mutants: bugs to plant in the runner. `scripts/mutants.py` checks that tests/runner notices each, within a time limit."""

# One line per mutant, to be read as a table.
# ruff: noqa: E501
# fmt: off

from __future__ import annotations

from tests.proof.planting import Mutant

RUNNER_MUTANTS = [
    # -- captures --------------------------------------------------------------------------------------------------------
    Mutant("rows are live while a pass is captured", "Passes._harmless", "self.inputs.ends.zero_()"),
    Mutant("a capture keeps the last bitmask", "Passes._harmless", "self.pipeline.bitmask.clear()"),
    Mutant("a captured sampling finds the lines of the last pass", "Passes._harmless", "self.run(PassShape(shape.size, 'logits'))"),
    Mutant("a pass is queued before its sampling is captured", "DeviceColumns.queue", "self._passes.prepare(...); self._lines = ...", "self._lines = self._passes.logits(p); self._passes.prepare(p, self._variant, parts)"),
    Mutant("a graph gets the inputs of its capture", "Passes.run", "if packed is not None: ..."),
    Mutant("all passes take the largest graph", "Passes.padded_slices", "sizes[bisect_left(sizes, num_slices)]", "sizes[-1]"),
    # -- columns ---------------------------------------------------------------------------------------------------------
    Mutant("a column that is sampled with the next pass is not counted", "Step.advance", "self._num_left -= 1"),
    Mutant("a column and the next pass are two launches", "DeviceColumns.sample_and_queue", "not self._passes.graphs.whole_passes", "True"),
    Mutant("a chunk without samples is not computed", "Pass.has_work", "bool(self.slices) or ...", "bool(self.slices)"),
    Mutant("only the last of several passes commits its tokens", "HostColumns.sample", "continued.append(tokens)", "continued[:] = [tokens]"),
    Mutant("the host does not read which rows are done", "HostColumns.__init__", "host.refresh_done(plan)", "pass"),
    # -- sampling and commits --------------------------------------------------------------------------------------------
    Mutant("a bitmask replaces penalties", "Pipeline.sample", "if shape.logits_processors: ...\nelse: ...", "if shape.logits_processors and not masked: ...\nelse: ..."),
    Mutant("samples before a fork are counted", "Pipeline.sample", "(lines.indices < 0) & ...", "..."),
    Mutant("a row with a new token stays done", "DeviceState.apply", "rows.done.index_fill_(0, token_rows, False)"),
    # -- drafts ----------------------------------------------------------------------------------------------------------
    Mutant("a plan ends where the host thinks that its rows are", "ModelRunner._upload", "torch.minimum(ends, ..., out=ends)", "ends"),
    Mutant("a slice after a prefill ends where its row was", "decode_slices", "most[list(plan.host_tokens)] = UNLIMITED"),
    Mutant("a row goes on from where it was", "DeviceState.apply", "rows.num_computed.index_copy_(0, token_rows, positions)"),
    Mutant("the history lacks the host's tokens", "DeviceState._history_writes", "start + len(tokens) > known[row]", "False"),
    Mutant("all drafts are kept", "Pipeline.sample", "lines.drafts is not None", "False"),
    Mutant("no pass knows its drafts", "Passes._decode_lines", "shape.num_drafts", "False"),
    Mutant("a prompt's token is sampled for the position before it", "Passes._prefill_lines", "rows.num_computed[inputs.sample_rows] + 1", "rows.num_computed[inputs.sample_rows]"),
    Mutant("the drafts of a slice are its last token", "DecodeSlices.lines", "np.arange(len(of_line)) - first[of_line]", "0 * of_line"),
    Mutant("a slice that may not draft drafts", "DecodeSlices.lines", "self.limits[of_line] == 0", "self.limits[of_line] < 0"),
    Mutant("the host has lines for rows that are done", "DecodeLines.next", "... & ~state.done.numpy()[slices.rows]", "..."),
    Mutant("a slice has all passes of its plan", "DecodeLines.next", "live &= self._num_passes < slices.passes"),
    Mutant("matches that disagree are as good as one alone", "Drafter._guess", "kind * NEXT_KIND + num_matched", "num_matched"),
    # -- drafts in grammars ----------------------------------------------------------------------------------------------
    Mutant("a draft takes the mask of the token before it", "mask_indices", "np.where(index < 0, -1, index + depths)", "index"),
    Mutant("the masks of drafts that are not computed are counted", "BitmaskBuffer.fill", "words[used]", "words"),
    Mutant("a sequence in a grammar has drafts without masks", "Drafter._guess", "drafts is None", "True"),
    Mutant("a pass is queued before the bitmask with its drafts", "Step.__init__", "lines is not None and lines.drafts", "False"),
    Mutant("drafts that the grammar forbids", "RequestGrammar.draft", "if num := matcher.num_allowed(found): ...\nelse: ...", "if num := len(found): ...\nelse: ...", equivalent="No mask allows such a draft: it is never right, and only takes lines."),
    Mutant("the mask after a draft is the one before it", "RequestGrammar.draft", "matchers.append(matcher)", "matchers.append(self.matcher(sequence))"),
    Mutant("masks before the tokens of the last column", "Engine._put_bitmask", "column and left[i] == submitted.masked_at[i]", "False"),
    Mutant("masks after drafts do not know where the output may end", "compute_bitmask", "row.grammar.apply_stop_tokens(...)", "depth or row.grammar.apply_stop_tokens(matcher, octets[i * size : (i + 1) * size])"),
    Mutant("bytes of bitmasks lose the drafts", "GrammarBitmask.decode", "found.items()", "()"),
    # -- draft models ----------------------------------------------------------------------------------------------------
    Mutant("a swap leaves a draft model's K and V", "KVSwapper.__init__", "[draft_pools] if draft_pools else []", "[]"),
    Mutant("a copy leaves a draft model's K and V", "DeviceState.apply", "if self.draft is not None: ..."),
    Mutant("a draft model does not see prompts", "Passes._forward", "self.draft_model.prefill(token_ids, batch)", "pass"),
    Mutant("a draft model skips passes without drafts", "DraftModel.propose", "range(num_drafts + 1)", "range(num_drafts + 1 if num_drafts else 0)"),
    Mutant("a draft model's last draft has no K and V", "DraftModel.propose", "range(num_drafts + 1)", "range(max(num_drafts, 1))"),
    # -- ranks -----------------------------------------------------------------------------------------------------------
    Mutant("ranks know different ones of many stop tokens", "pack_setups", "sorted(setup.stop_ids)", "list(setup.stop_ids)"),
    Mutant("filters see a slice of the vocabulary", "ModelRunner.execute", "needs_all or processors.filters_all(plan)", "needs_all"),
    # -- recorded passes -------------------------------------------------------------------------------------------------
    Mutant("a recorded pass samples without the filters", "ModelRunner.execute", "filters or not (self.platform.is_host or sliced)", "not (self.platform.is_host or sliced)"),
    Mutant("a recording writes to the column of another plan", "RecordedGraphs._undone", "[self._step_counter, *self._of_states]", "self._of_states"),
    Mutant("a lost plan is not noticed", "PlanReader._check_piece", "number != self._number", "False"),
    Mutant("a torn plan is taken", "PlanReader._check_piece", "checksum(...) != crc", "False"),
    Mutant("a plan is longer than what was written", "PlanReader._check_piece", "size > num_unread - _HEADER.size", "False"),
    Mutant("a position that runs backwards is followed", "PlanReader._check_piece", "not _HEADER.size <= num_unread <= ring.capacity", "False"),
    Mutant("the rest of a message is another's", "PlanReader.receive", "parts and ...", "False and ..."),
    Mutant("the writer overtakes the slowest reader", "PlanWriter._wait_for_room", "min(positions := self._positions())", "max(positions := self._positions())"),
    Mutant("the end of the ring is written, and not its beginning", "PlanRing.copy_in", "self.bytes[: len(data) - first] = data[first:]"),
    Mutant("a reader keeps the room of what it has read", "PlanReader._next_piece", "self._ring.numbers[self._line] = self._read"),
    Mutant("a piece's length is not under its checksum", "checksum", "zlib.crc32(part, zlib.crc32(header))", "zlib.crc32(part)"),
    # -- outputs ---------------------------------------------------------------------------------------------------------
    Mutant("a plan overwrites unread output", "OutputBuffers.new_output", "output.detach()", "pass"),
    Mutant("a step at its end keeps its tensors", "Executor._end", "handle.step = None"),
]
