"""Answers to the exercises of learn.py: lazy or wrong ones, each beside the promise that must refuse it, and
honest ones, spelled otherwise than the lesson, which must be Done.

An answer has the bodies that its exercise leaves out, in their order, with --- between two; ... is the
lesson's own.
"""

# (exercise, a piece of the lesson's own answer, what stands in its place, what is said of it).
# Without a piece, all of the answer.
LAZY = [
    ("single", " / config.accum", "", ", 3.0000"),
    ("single", "config.accum", "3", ", 0.3333"),
    ("collectives-real", "", "dist.all_reduce(x)", "bytes sent, all-reduce"),
    ("collectives-real", "", "naive_all_reduce(x)", "bytes sent, send"),
    ("dp_threads", "in self.copies:", "in self.copies[: len(self.copies) // 2]:", "gradient norm of step 1"),
    ("dp_threads", "self.parallel_apply(send, gradient.tensor_split(len(self.devices)), self.devices)",
     "gradient.tensor_split(len(self.devices))", "foreign read"),
    ("dp_async", "param.grad.add_(gradient)", "gradient", "gradient norm"),
    ("dp_async", "if sum(self.clocks) % self.pushes_per_update == 0:", "if True:", "2 ranks: losses"),
    ("ddp", "config.accum * world_size", "config.accum", ", 2.0000"),
    ("ddp", "world_size", "2", ", 0.5000"),
    ("ddp-real", "async_op=True)", "async_op=True); self.work.wait()", "hides each all-reduce"),
    ("ddp-real", "not self.is_last_backward", "False", "3 microbatches: losses"),
    ("noise_scale", "big - noise / big_batch", "big", "all that it prints"),
    ("noise_scale", "/ (1 / small_batch - 1 / big_batch)", "* big_batch", "all that it prints"),
    ("uneven", "/ n_tokens", "/ targets.ne(PADDING).sum()", "losses"),
    ("uneven", "/ n_tokens", "/ n_tokens * dist.get_world_size()", ", 2.0000"),
    ("zero1", "async_op=True)", "async_op=True); self.reducing.wait()", "hides each reduce-scatter"),
    ("zero1", "", """
    self.received = self.flatten([param.grad for param in self.params])
    for param in self.params:
        param.grad = None
    self.reducing = dist.all_reduce(self.received, async_op=True)
    ---
    if self.reducing:
        self.reducing.wait()
        self.shard.grad = self.received.chunk(dist.get_world_size())[dist.get_rank()].to(self.shard)
        self.reducing = self.received = None""", "bytes sent"),
    ("zero2", "", """
    unit.missing -= 1
    if not any(each.missing for each in self.units):
        for each in self.units:
            each.missing = len(each.params)
            each.start_reduce_scatter()""", "3 microbatches: losses"),
    ("zero2", "self.finish_reduce_scatters()", "unit.start_reduce_scatter(); return", "losses"),
    ("zero3", "async_op=True)", "async_op=True); self.gathering.wait()", "hides each all-gather"),
    ("zero3", "param.data = self.nan.expand(param.shape)", "pass", "bytes held, parameters"),
    ("zero3-notes", "", """
    return tensor.detach(), tensor._version
    ---
    return kept[0]""", "bytes held, parameters"),
    ("zero3-notes", ".as_strided(*kept[1:])", "[: kept[1].numel()].view(kept[1])", "gradient norm of step 1"),
    ("hsdp", "async_op=True)", "async_op=True); self.summing.wait()", "hides each all-reduce"),
    ("hsdp", "group=self.replicas", "group=self.node", "gradient norm of step 1"),
    ("muon", "X.shape[0] > X.shape[1]", "False", "computed twice"),
    ("muon", "range(5)", "range(4)", "losses"),
    ("diloco", "            average(outer.grad)\n", "", "losses"),
    ("diloco", "self.sgd.step()", "torch._foreach_sub_(self.outer, [each.grad for each in self.outer])",
     "losses"),
    ("offload-real", "self.shard.grad += self.staging", "self.shard.grad.copy_(self.staging)",
     "3 microbatches: losses"),
    ("offload-real", "async_op=True)", "async_op=True); self.finish_gather()", "hides each all-gather"),
    ("tensor_parallel-real", "async_op=True)", "async_op=True); work.wait()", "hides each all-reduce"),
    ("tensor_parallel-real", "= grad @ weight",
     "= grad @ weight / dist.get_world_size()", "gradient norm of step 1"),
    ("tensor_parallel-loss", "", """
    logits = logits.to(wide(logits.dtype)).flatten(0, 1)
    column, is_here = own_index(targets.flatten(), logits.shape[1])
    target = logits.gather(1, column[:, None])[:, 0] * is_here
    exp_sum, target = add_up(torch.stack([logits.exp().sum(-1), target]))
    return (exp_sum.log() - target).mean()""", "with --lr 10"),
    ("tensor_parallel-loss", "", """
    logits = logits.to(wide(logits.dtype)).flatten(0, 1)
    rank, world_size, size = dist.get_rank(), dist.get_world_size(), logits.shape[1]
    whole = add_up(F.pad(logits, (rank * size, (world_size - 1 - rank) * size)))
    return F.cross_entropy(whole, targets.flatten())""", "bytes sent"),
    ("sequence_parallel", "work, own = start_reduce_scatter(x)", """dist.all_reduce(x)
    work, own = start_gather(x.chunk(dist.get_world_size(), 1)[dist.get_rank()].clone())[0], (
        x.chunk(dist.get_world_size(), 1)[dist.get_rank()].clone())""", "bytes sent"),
    ("sequence_parallel", "return own", "return own / dist.get_world_size()", "2 ranks: losses"),
    ("fsdp_tp", 'group=MESH["row"]', 'group=MESH["column"]', "2 ranks"),
    ("fsdp_tp", "gradients, group=self.group, async_op=True)",
     "gradients, group=self.group, async_op=True); self.reducing.wait()", "hides each reduce-scatter"),
    ("context_parallel", "", """
    total = lse.exp() + scores.exp().sum(-1, keepdim=True)
    out.copy_((out * lse.exp() + scores.exp() @ v) / total)
    lse.copy_(total.log())""", "--lr 10"),
    ("context_parallel", "out.mul_((lse - new_lse).exp())", "pass", "losses"),
    ("expert_parallel", "expert(torch.cat(pieces[own]))",
     "expert(torch.cat([*pieces[own], rows]))[: arriving[:, i].sum()]", "bytes held, a"),
    ("expert_parallel", "slice(i, None, len(self.experts))",
     "slice(i * ep, (i + 1) * ep)", "2 ranks"),
    ("expert_zero", "unit.flat = None", "pass", "bytes held, parameters"),
    ("expert_zero", "reduce_scatter(received, unit.flatten(gradients), group=unit.group)",
     "flat = unit.flatten(gradients); dist.all_reduce(flat, group=unit.group); "
     "received = flat.chunk(dist.get_world_size(unit.group))[dist.get_rank(unit.group)]", "bytes sent"),
    ("checkpointing-real", "raise AllSaved", "pass", "computed twice"),
    ("checkpointing-real", "return tensor.detach()", "return tensor", "bytes held"),
    ("zero_r", "own.new_empty(len(own) * dist.get_world_size())",
     "own.repeat(dist.get_world_size()); dist.all_reduce(own.clone())", "bytes sent"),
    ("zero_r", "async_op=True)", "async_op=True); self.gathering.wait()", "hides each all-gather"),
    ("fusion-real", "weighted * correction + exps", "weighted + exps", "--tile 20"),
    ("fusion-real", "", """
    scores = scores_of(q, k)
    lse = scores.logsumexp(-1, keepdim=True)
    out = (scores - lse).exp().to(v.dtype) @ v
    ctx.save_for_backward(q, k, v, out, lse)
    ctx.tile = tile
    return out""", "bytes held, a"),
    ("pipeline", "", 'return "F" * k + "B" * k', "bytes held, a"),
    ("pipeline", "", 'return "FB" * k', "no rank waits longer"),
    ("pipeline-real", "", "naive(stage, batch, message)", "no rank waits longer"),
    ("pipeline-real", "in_flight.pop(0)", "in_flight.pop()", "gradient norm of step 1"),
    ("zero_bubble", "", """
    output = F.linear(x, self.weight.detach(), self.bias)
    output.register_hook(lambda grad: self.weight.backward(grad.flatten(0, 1).T @ x.detach().flatten(0, 1)))
    return output
    ---
    pass""", "no rank waits longer"),
    ("zero_bubble", "self.weight.detach()", "self.weight", "gradient norm of step 1"),
    ("pipeline_v", "", 'return "FfbWBW" * k', "no rank waits longer"),
    ("pipeline_v", "", """
    half = "W" if schedule == "zb-v" else ""
    return "F" * k + "f" * k + f"b{half}" * k + f"B{half}" * k""", "bytes held, a"),
    ("parallel_3d", "ranks.movedim(dim, -1)", "ranks.movedim(dim, 0)", "2 ranks"),
    ("parallel_3d", "ranks.movedim(dim, -1).flatten(0, -2)", "ranks.view(-1, ranks.shape[dim])", "4 ranks"),
    ("reshard-real", "holder.shard.detach()[places]", "torch.zeros(len(places))", "all that it prints"),
    ("reshard-real", "holder.flat.split(plan)", "holder.flat.clone().split(plan)", "all that it prints"),
    ("resume", "max(file_start, rank_start)", "rank_start", "it ends well"),
    ("resume", "i * in_file", "0", "weights are the lesson's"),
    ("survive", 'all(vote == "yes" for vote in votes.values())', "True", "it ends well"),
    ("survive", " if votes[worker] is not None}", "}", "it ends well"),
]  # fmt: skip

HONEST = [  # the same, but nothing is said
    ("single", "", "loss = (1 / config.accum) * mean_loss(model(inputs), targets)"),
    ("collectives-real", "", """
    rank, n = dist.get_rank(), dist.get_world_size()
    before, after = (rank - 1) % n, (rank + 1) % n
    chunks = x.flatten().tensor_split(n)
    for i in range(n - 1):  # the other way round the ring
        incoming = torch.empty_like(chunks[(rank + i + 1) % n])
        exchange((dist.irecv, incoming, after), (dist.isend, chunks[(rank + i) % n], before))
        chunks[(rank + i + 1) % n].add_(incoming)
    for i in range(n - 1):
        sent, received = chunks[(rank + i - 1) % n], chunks[(rank + i) % n]
        exchange((dist.irecv, received, after), (dist.isend, sent, before))"""),
    ("dp_threads", "", """
    sizes = [len(output) for output in self.outputs]
    parts = self.parallel_apply(send, gradient.split(sizes), self.devices)
    self.parallel_apply(lambda output, part: output.backward(part), self.outputs, parts)
    for param, copied in self.copies:
        param.grad.add_(send(copied.grad, param.device))
    for replica in self.replicas[1:]:
        replica.zero_grad()
    self.outputs = None"""),
    ("dp_async", "", """
    with self.condition:
        self.wait_for(lambda: len(self.inbox) > 0)
        worker, replica, version, loss = self.inbox.pop(0)
        for param, copied in zip(self.module.parameters(), replica.parameters()):
            gradient = copied.grad.to(param.device, copy=True).to(param.dtype)
            param.grad = gradient if param.grad is None else gradient + param.grad
        self.ages[self.version - version] += 1
        self.clocks[worker] = self.clocks[worker] + 1
        if not sum(self.clocks) % self.pushes_per_update:
            self.update()
        self.condition.notify_all()
    return loss"""),
    ("ddp", "", "loss = mean_loss(model(inputs), targets).div(config.accum).div(world_size)"),
    ("ddp-real", "", """
    sizes = [param.numel() for param in self.params]
    self.flat = torch.empty(sum(sizes), dtype=self.params[0].dtype, device=self.params[0].device)
    for param, part in zip(self.params, self.flat.split(sizes)):
        part.copy_(param.grad.flatten())
        param.grad = part.view(param.shape)
    self.work = dist.all_reduce(self.flat, async_op=True)
    ---
    self.work.wait()
    self.work = self.flat = None
    self.missing = len(self.params)
    ---
    if self.is_last_backward:
        bucket.missing -= 1
        for number, each in enumerate(self.buckets):
            if each.missing:
                break
            if number == self.n_sent:
                each.start_all_reduce()
                self.n_sent += 1"""),
    ("noise_scale", "", """
    signal = (big_batch * big - small_batch * small) / (big_batch - small_batch)
    return signal, small_batch * (small - signal)"""),
    ("uneven", "", """
    counts = targets != PADDING
    logits = logits.to(wide(logits.dtype))
    losses = -logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
    return (losses * counts).sum().div(n_tokens)"""),
    ("diloco", "", """
    moved = [outer - param for outer, param in zip(self.outer, self.inner.masters)]
    flat = torch.cat([each.flatten() for each in moved])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for outer, part in zip(self.outer, flat.split([outer.numel() for outer in self.outer])):
        outer.grad = part.view_as(outer)
    self.sgd.step()
    for outer, master, param in zip(self.outer, self.inner.masters, self.inner.params):
        outer.grad = None
        master.copy_(outer)
        param.copy_(outer)"""),
    ("zero1", "", """
    gradients = self.flatten([param.grad for param in self.params])
    for param in self.params:
        param.grad = None
    self.received = gradients.new_empty(len(self.own))
    self.reducing = reduce_scatter(self.received, gradients, async_op=True)
    ---
    if self.reducing is None:
        return
    self.reducing.wait()
    if self.shard.grad is None:
        self.shard.grad = torch.zeros_like(self.shard)
    self.shard.grad += self.received
    self.reducing = self.received = None"""),
    ("zero1", "", """
    gradients = self.flatten([param.grad for param in self.params])
    for param in self.params:
        param.grad = None
    self.received = gradients.new_empty(dist.get_world_size(), len(self.own))
    self.reducing = dist.all_to_all_single(self.received.view(-1), gradients, async_op=True)
    ---
    if self.reducing:
        self.reducing.wait()
        self.shard.grad = self.received.sum(0).to(self.shard)
        self.reducing = self.received = None"""),
    ("zero2", "", """
    unit.missing -= 1
    if unit.missing:
        return
    for each in self.units:
        each.finish_reduce_scatter()
    unit.start_reduce_scatter()
    unit.missing = len(unit.params)"""),
    ("zero3", "", """
    if self.flat is not None:
        return
    ranks, rank = dist.get_world_size(), dist.get_rank()
    numel = self.shard.numel()
    self.flat = torch.empty(ranks * numel, dtype=self.dtype, device=self.shard.device)
    own = self.flat[rank * numel : (rank + 1) * numel]
    own.copy_(self.shard.detach())
    UNIT_OF[self.flat.untyped_storage()] = self
    self.gathering = all_gather(self.flat, own, async_op=True)
    ---
    if self.gathering is None:
        return
    self.gathering.wait()
    self.gathering = None
    place = 0
    for param, size in zip(self.params, self.sizes):
        param.data = self.flat[place : place + size].view(param.shape)
        place += size
    ---
    self.finish_gather()
    for param in self.params:
        param.data = self.nan.expand(param.shape)
    if self.flat is not None:
        UNIT_OF.pop(self.flat.untyped_storage())
    self.flat = None"""),
    ("zero3-notes", "", """
    if tensor.untyped_storage() in UNIT_OF:
        where = tensor.size(), tensor.stride(), tensor.storage_offset()
        return UNIT_OF[tensor.untyped_storage()], where
    return None, tensor.detach()
    ---
    unit, kept = kept
    if unit is None:
        return kept
    unit.start_gather()
    unit.finish_gather()
    return torch.as_strided(unit.flat, *kept)"""),
    ("hsdp", "", """
    gradient = self.shard.grad.view(-1)
    self.summing = dist.all_reduce(gradient, dist.ReduceOp.SUM, self.replicas, True)
    ---
    work, self.summing = self.summing, None
    work.wait()"""),
    ("muon", "", """
    turned = X.shape[0] > X.shape[1]
    if turned:
        X = X.T
    X = X / X.norm().clamp_min(1e-7)
    for _ in range(5):
        A = X @ X.T
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return X.T if turned else X"""),
    ("offload-real", "", """
    if self.reducing is None:
        return
    with torch.cuda.stream(self.link):
        self.reducing.wait()
        gradient = self.received.to("cpu")
    self.shard.grad.add_(gradient)
    self.reducing = self.received = None
    ---
    torch._foreach_copy_([self.staging], [self.shard.detach()])
    with torch.cuda.stream(self.link):
        self.own[:] = self.staging
        self.gathering = all_gather(self.flat, self.own, async_op=True)"""),
    ("tensor_parallel-real", "", """
    x, weight = ctx.saved_tensors
    grad_x = F.linear(grad, weight.t())
    work = dist.all_reduce(grad_x, async_op=True)
    grad_weight = torch.einsum("bso,bsh->oh", grad, x)
    work.wait()
    return grad_x, grad_weight"""),
    ("tensor_parallel-loss", "", """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    lse = logits.logsumexp(-1)
    largest = lse.detach().clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    column, is_here = own_index(targets, logits.shape[-1])
    target = (logits.gather(-1, column[..., None])[..., 0] - largest) * is_here
    both = add_up(torch.stack([(lse - largest).exp(), target]))
    return (both[0].log() - both[1]).sum() / targets.numel()"""),
    ("fsdp_tp", "", """
    dist.all_reduce(x.data, dist.ReduceOp.SUM, MESH["row"])
    return x
    ---
    flat = torch.cat([param.grad.reshape(-1) for param in self.params])
    for param in self.params:
        param.grad = None
    size = len(self.shard) * dist.get_world_size(self.group)
    self.received = flat.new_empty(self.shard.shape)
    flat = F.pad(flat, (0, size - len(flat)))
    self.reducing = reduce_scatter(self.received, flat, group=self.group, async_op=True)
    ---
    if self.flat is not None:
        return
    ranks, rank = dist.get_process_group_ranks(self.group), dist.get_rank()
    self.flat = self.nan.repeat(len(ranks) * len(self.shard))
    UNIT_OF[self.flat.untyped_storage()] = self
    own = self.flat.view(len(ranks), -1)[ranks.index(rank)]
    own[:] = self.shard.detach()
    self.gathering = all_gather(self.flat, own, group=self.group, async_op=True)"""),
    ("sequence_parallel", "", """
    size = dist.get_world_size()
    parts = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, 1)
    ---
    own = torch.empty_like(x.chunk(dist.get_world_size(), 1)[0])
    reduce_scatter(own, torch.cat(x.chunk(dist.get_world_size(), 1)))
    return own"""),
    ("context_parallel", "", """
    block_lse = scores.logsumexp(-1, keepdim=True)
    out.lerp_((scores - block_lse).exp() @ v, torch.sigmoid(block_lse - lse))
    lse.copy_(torch.logaddexp(lse, block_lse))"""),
    ("expert_parallel", "", """
    ranks, mine = dist.get_process_group_ranks(self.group), dist.get_rank(self.group)
    counts = counts[ranks].unflatten(1, (len(ranks), -1))
    sent, received = counts[mine].sum(1).tolist(), counts[:, mine].sum(1).tolist()
    rows = AllToAll.apply(rows, sent, received, self.group)
    numbers = torch.arange(len(self.experts))
    owner = torch.cat([numbers.repeat_interleave(each) for each in counts[:, mine]])
    order = owner.to(rows.device).argsort(stable=True)
    parts = rows[order].split(counts[:, mine].sum(0).tolist())
    outputs = torch.cat([expert(part) for expert, part in zip(self.experts.values(), parts)])
    return AllToAll.apply(outputs[order.argsort()], received, sent, self.group)"""),
    ("expert_zero", "", """
    ctx.unit, weights, begin = unit, [], 0
    unit.gather()
    for shape in unit.shapes.values():
        weights.append(unit.flat[begin : begin + shape.numel()].view(shape))
        begin += shape.numel()
    return tuple(weights)
    ---
    flat = ctx.unit.flatten(gradients)
    ctx.unit.flat = None
    received = flat.new_empty(len(ctx.unit.shard))
    reduce_scatter(received, flat, group=ctx.unit.group)
    return received.to(ctx.unit.shard), None"""),
    ("checkpointing-real", "", """
    tensors, states_now = [], get_random_states()

    def note(tensor):
        tensor = tensor.detach()
        tensors.append(tensor)
        if len(tensors) >= n:
            raise AllSaved
        return tensor

    set_random_states(random_states)
    try:
        with torch.enable_grad(), saved_tensors_hooks(note, lambda tensor: tensor):
            function(*args)
    except AllSaved:
        pass
    finally:
        set_random_states(states_now)
    return tensors"""),
    ("zero_r", "", """
    if self.gathering is None:
        own = self.shard.to(self.device, non_blocking=True)
        self.flat = torch.zeros(dist.get_world_size(), len(own), dtype=own.dtype, device=self.device)
        self.gathering = all_gather(self.flat.view(-1), own, async_op=True)
    ---
    if not self.gathering:
        self.start_gather()
    self.gathering.wait()
    flat = self.flat.flatten()
    self.flat = self.gathering = None
    before, self.previous = self.previous, None
    Shard.latest = None
    if before is not None:
        before.start_gather()
    x = flat[: self.shape.numel()].reshape(self.shape)
    x.requires_grad_(self.requires_grad)
    return x"""),
    ("fusion-real", "", """
    out, lse = torch.zeros_like(q), torch.full_like(q[..., :1], -torch.inf, dtype=wide(q.dtype))
    for i, (q_i, out_i, lse_i) in enumerate(tiles(tile, q, out, lse)):
        for j, (k_j, v_j) in enumerate(tiles(tile, k, v)[: i + 1]):
            scores = scores_of(q_i, k_j, i == j).to(lse.dtype)
            both = torch.logaddexp(lse_i, scores.logsumexp(-1, keepdim=True))
            out_i.copy_(out_i * (lse_i - both).exp() + (scores - both).exp().to(v.dtype) @ v_j)
            lse_i.copy_(both)
    ctx.save_for_backward(q, k, v, out, lse)
    ctx.tile = tile
    return out"""),
    ("pipeline", "", """
    if schedule == "naive":
        return "FB" * k
    ahead = k if schedule == "gpipe" else min(world_size - rank - 1, k)
    ops = ["F"] * ahead
    for _ in range(k - ahead):
        ops += ["F", "B"]
    return ops + ["B"] * ahead"""),
    ("pipeline-real", "", """
    batch, kept, works, done = list(batch), {}, [], {"F": 0, "B": 0}
    for op in ops:
        j = done[op]
        done[op] += 1
        for work in works[:-1]:
            work.wait()
        works = works[-1:]
        if op == "F":
            x, targets = batch[j]
            if not stage.is_first:
                x = receive(message, stage.previous, groups["F"])
                x.requires_grad_()
            kept[j] = x, stage(x, targets)
            if not stage.is_last:
                works.append(dist.isend(kept[j][1].detach(), stage.next, groups["F"]))
        elif stage.is_last:
            x, loss = kept.pop(j)
            loss.backward()
        else:
            x, output = kept.pop(j)
            torch.autograd.backward(output, receive(message, stage.next, groups["B"]))
        if op == "B" and not stage.is_first:
            works.append(dist.isend(x.grad, stage.previous, groups["B"]))
    for work in works:
        work.wait()"""),
    ("zero_bubble", "", """
    output = F.linear(x, self.weight.detach(), self.bias)
    inputs = x.detach()
    output.register_hook(lambda grad: self.factors.append((inputs, grad)))
    return output
    ---
    x, grad = (each.reshape(-1, each.shape[-1]) for each in self.factors.pop(0))
    old = torch.zeros_like(self.weight) if self.weight.grad is None else self.weight.grad
    self.weight.grad = torch.addmm(old, grad.t(), x)"""),
    ("pipeline_v", "", """
    below, to_come = world_size - 1 - rank, -(-k // world_size) * world_size
    if schedule == "gpipe":
        return "".join(letter * k for letter in "FfbB")
    if schedule == "interleaved":
        groups = range(to_come // world_size)
        forwards = "".join("F" * world_size + "f" * world_size for _ in groups)
        backwards = forwards.swapcase().replace("F", "B").replace("f", "b")
        begin = min(world_size + 2 * below, 2 * to_come)
        both = "".join(f + b for f, b in zip(forwards[begin:], backwards))
        return forwards[:begin] + both + backwards[2 * to_come - begin :]
    phases = [("F", 2 * below + 1), ("fF", rank), ("fbW", below + 1)]
    phases += [("FBWfbW", k - world_size), ("Bb", rank), ("BW", below + 1), ("W", 2 * rank)]
    return "".join(letters * times for letters, times in phases)"""),
    ("parallel_3d", "", """
    own = None
    for row in ranks.transpose(dim, 2).reshape(-1, ranks.shape[dim]).tolist():
        group = dist.new_group(row, group_desc=name)
        own = group if dist.get_rank() in row else own
    return own"""),
    ("reshard-real", "", """
    works, begin = [], 0
    for i, each in enumerate(plan):
        if isinstance(holder, Server):
            piece = holder.flat.narrow(0, begin, each)
            works.append(dist.P2POp(dist.irecv, piece, i))
            begin += each
        else:
            piece = holder.shard.detach().index_select(0, each).to(holder.dtype)
            works.append(dist.P2POp(dist.isend, piece, config.trainers + i))
    for work in dist.batch_isend_irecv(works) if works else ():
        work.wait()"""),
    ("resume", "", """
    table = torch.from_numpy(np.load(path, mmap_mode="c"))
    if zlib.crc32(table.numpy()) != checksum:
        sys.exit(f"{path} has changed")
    place = i * table.shape[1] - dist.get_rank() * len(rows[0])
    for row, saved in zip(rows, table):
        part = saved[max(-place, 0) : max(len(row) - place, 0)]
        row[max(place, 0) :][: len(part)] = part"""),
    ("survive", "", """
    step, failures = 1, 0
    while step <= config.steps:
        votes = hear_all(workers, config.timeout)
        counts = set(votes.values()) == {"yes"}
        step, failures = step + counts, failures + (not counts)
        for worker, vote in votes.items():
            if vote is None:
                del workers[worker]
        for worker in workers:
            with suppress(OSError):
                workers[worker][1].send((counts, failures, list(workers)))
    process = list(workers.values())[0][0]
    process.join()
    return process.exitcode"""),
]  # fmt: skip
