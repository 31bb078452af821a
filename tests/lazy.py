"""Answers to the exercises of learn.py: lazy or wrong ones, each beside the promise that must refuse it, and
honest ones, spelled otherwise than the lesson, which must all be Done.

An answer has the bodies that its exercise leaves out, in their order, with --- between two; ... is the
lesson's own. tests/test_learn.py puts them in their places."""

LAZY = [  # (exercise, what the first broken promise says, answer)
    ("single", "the loss of step 1 is 3.000 times", "microloss = mean_loss(model(inputs), targets)"),
    ("single", "the loss of step 1 is 0.333 times",
     "microloss = mean_loss(model(inputs), targets) / 3"),
    ("single-clip", "gradients of norm 0.3, below max_norm 1", """
        grads = [param.grad for param in params if param.grad is not None]
        norm = torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt()
        for grad in grads:
            grad *= max_norm / (norm + 1e-6)
        return norm
     """),
    ("single-clip", "the loss of step 2 is", """
        norms = []
        for param in params:
            norms.append(param.grad.norm())
            param.grad *= (max_norm / (norms[-1] + 1e-6)).clamp(max=1)
        return torch.stack(norms).norm()
     """),
    ("collectives", "bytes sent", """
        flat = torch.cat(chunks)
        dist.all_reduce(flat)
        for chunk, total in zip(chunks, flat.tensor_split(len(chunks))):
            chunk.copy_(total)
        return chunks[dist.get_rank()]
     """),
    ("collectives-gather", "sends to rank", """
        rank, size = dist.get_rank(), len(chunks)
        for i in range(1, size):
            exchange(chunks[rank], rank + i, chunks[(rank - i) % size], rank - i)
     """),
    ("collectives-gather", "bytes sent", """
        for source, chunk in enumerate(chunks):
            dist.all_reduce(chunk if source == dist.get_rank() else chunk.zero_())
     """),
    ("dp_threads", "three devices' calls run, or come back, one after another", """
        return [thread.submit(function, *given).result() for thread, *given in zip(self.threads, *arguments)]
     """),
    ("dp_threads-sum", "3 ranks: losses and gradient norms", """
        params, *others = [list(replica.parameters()) for replica in replicas]
        for param, copied in zip(params, others[-1] if others else []):
            param.grad += send(copied.grad, param.device)
        return [param.grad for param in params]
     """),
    ("dp_async", "ssp, 2 ahead", "return self.clocks[worker] <= min(self.clocks)"),
    ("dp_async", "asp, inf ahead", """
        return self.clocks[worker] <= min(self.clocks) + min(self.most_ahead, 2)
     """),
    ("ddp", "the gradient norm of step 1 is 2.000 times", "view.copy_(grad)"),
    ("ddp", "the gradient norm of step 1 is 0.500 times", "torch.mul(grad, 1 / 2, out=view)"),
    ("ddp-buckets", "7 buckets of parameters", "return [[param] for param in reversed(params)]"),
    ("ddp-buckets", "1 buckets of parameters", "return [list(reversed(params))]"),
    ("ddp-overlap", "matrix products while one travels", """
        bucket.collect(param, self.is_last_backward)
        if self.is_last_backward and not self.waiting:
            self.waiting.extend(self.buckets)
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        if self.is_last_backward:
            bucket.pending.remove(param)
            if not any(each.pending for each in self.buckets):
                self.waiting.clear()
        ---
        pass
        ---
        dist.all_reduce(self.flat_grad)
        self.pending.update(self.params)
     """),
    ("ddp-overlap", "is added to another layer's", """
        bucket.collect(param, self.is_last_backward)
        if not self.is_last_backward:
            return
        if not self.waiting:
            self.waiting.extend(self.buckets)
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        bucket.pending.remove(param)
        if not bucket.pending:
            self.waiting.remove(bucket)
            bucket.start_all_reduce()
        ---
        ...
        ---
        ...
     """),
    ("uneven", "losses and gradient norms are the plain loop's", """
        microloss = sum_of_losses(model(inputs, positions), targets) / targets.count_nonzero().clamp(min=1)
     """),
    ("uneven-agree", "losses and gradient norms are the plain loop's", """
        n_tokens = sum(targets.count_nonzero() for _, targets, _ in batches) * dist.get_world_size()
        most = torch.tensor(len(batches), device=device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        batches += [torch.zeros(3, 1, 1, dtype=torch.int64, device=device)] * (most.item() - len(batches))
        return n_tokens, most.item()
     """),
    ("uneven-agree", "of which rank", """
        n_tokens = torch.zeros((), dtype=torch.int64, device=device)
        for _, targets, _ in batches:
            n_tokens += targets.count_nonzero()
        number = torch.full_like(n_tokens, len(batches))
        dist.all_reduce(n_tokens)
        dist.all_reduce(number)
        batches += [n_tokens.new_zeros(3, 1, 1)] * (number.item() - len(batches))
        return n_tokens, number.item()
     """),
    ("zero1", "while one travels", """
        rows = self.flat_grad.view(self.n_shards, -1)
        self.received = torch.empty_like(rows)
        self.reduce_work = dist.all_to_all_single(self.received, rows, async_op=True)
        self.reduce_work.wait()
        ---
        ...
     """),
    ("zero1", "in bf16", """
        ...
        ---
        self.reduce_work.wait()
        gradient = self.received.sum(0)
        self.shard.grad = gradient if self.shard.grad is None else self.shard.grad + gradient
        self.received = None
     """),
    ("zero1", "several backwards add up", """
        ...
        ---
        self.reduce_work.wait()
        self.shard.grad = self.received.sum(0, dtype=self.shard.dtype)
        self.received = None
     """),
    ("zero1-gather", "while one travels", """
        self.own_param.copy_(self.shard.data)
        all_gather(self.flat_param, self.own_param)
        ---
        pass
     """),
    ("zero1-gather", "in bf16", """
        self.gather_work = all_gather(self.flat_param, self.own_param, async_op=True)
        ---
        ...
     """),
    ("zero1-units", "units", """
        units = {module: []}
        for submodule in module.modules():
            if isinstance(submodule, unit_class):
                units[submodule] = [param for param in submodule.parameters() if param.requires_grad]
        known = {param for params in units.values() for param in params}
        units[module] = [param for param in module.parameters() if param not in known]
        return [(submodule, params) for submodule, params in units.items() if params]
     """),
    ("zero2", "bytes held, gradients", """
        if self.flat_grad.untyped_storage().nbytes() == 0:
            self.flat_grad.untyped_storage().resize_(self.flat_grad.nbytes)
            self.flat_grad.zero_()
        torch.mul(param.grad.to_dense(), 1 / self.n_shards, out=self.grad_views[param])
        param.grad = None
        ---
        self.reduce_work.wait()
        if self.shard.grad is None:
            self.shard.grad = torch.zeros_like(self.shard)
        self.shard.grad += self.received.sum(0)
        self.received = None
     """),
    ("zero2", "3 microbatches: losses and gradient norms", """
        ...
        ---
        self.reduce_work.wait()
        self.flat_grad.untyped_storage().resize_(0)
        self.shard.grad = self.received.sum(0).to(self.shard.dtype)
        self.received = None
     """),
    ("zero3", "bytes held, parameters", """
        if getattr(self, "is_old", True):
            self.is_old = False
            self.flat_param.untyped_storage().resize_(self.flat_param.nbytes)
            self.own_param.copy_(self.shard.data)
            self.gather_work = all_gather(self.flat_param, self.own_param, async_op=True)
        ---
        ...
        ---
        self.in_backward = False
        self.wait_for_unshard()
        self.is_old = True
     """),
    ("zero3", "while one travels", """
        if self.flat_param.untyped_storage().nbytes() == 0:
            self.flat_param.untyped_storage().resize_(self.flat_param.nbytes)
            self.own_param.copy_(self.shard.data)
            all_gather(self.flat_param, self.own_param)
            for param, view in zip(self.params, self.param_views):
                param.data = view
        ---
        pass
        ---
        ...
     """),
    ("zero3-prefetch", "while one travels", "unit.unshard()\nunit.wait_for_unshard()"),
    ("zero3-prefetch", "bytes held, parameters", """
        i = self.units.index(unit)
        for each in self.units[i::direction]:
            each.unshard()
        unit.wait_for_unshard()
     """),
    ("zero3-unit", "bytes held, gradients", """
        ...
        ---
        ...
        ---
        ...
        ---
        ...
        ---
        ...
        ---
        ...
        ---
        self.reduce_work.wait()
        if self.shard.grad is None:
            self.shard.grad = torch.zeros_like(self.shard)
        self.shard.grad += self.received.sum(0)
     """),
    ("hsdp", "while one travels", """
        self.total = self.shard.grad.to(self.own_param.dtype)
        dist.all_reduce(self.total, group=self.replica_group)
        ---
        self.shard.grad.copy_(self.total / dist.get_world_size(self.replica_group))
        self.total = self.all_reduce_work = None
     """),
    ("hsdp", "losses and gradient norms are the plain loop's", "pass\n---\npass"),
    ("muon", "FLOPs for a matrix of", """
        X = X / X.norm().clamp(min=1e-7)
        for _ in range(5):
            A = X @ X.mT
            X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
        return X
     """),
    ("muon", "a matrix of zeros becomes nan", """
        turned = X.shape[0] > X.shape[1]
        X = X.mT if turned else X
        X = X / X.norm()
        for _ in range(5):
            A = X @ X.mT
            X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
        return X.mT if turned else X
     """),
    ("diloco", "with a delay", """
        ...
        ---
        self.reduce_work.wait()
        self.reduce_work = None
        outer = self.outer[self.fragment]
        outer.grad /= dist.get_world_size()
        self.optimizer.step()
        outer.grad = None
        self.inner[self.fragment].copy_(outer)
     """),
    ("diloco", "2 ranks: ", """
        ...
        ---
        self.reduce_work.wait()
        self.reduce_work = None
        outer = self.outer[self.fragment]
        self.optimizer.step()
        outer.grad = None
        self.inner[self.fragment].lerp_(outer, 0.5 if self.delay else 1)
     """),
    ("offload", "3 microbatches: losses and gradient norms", """
        launch_job.result().wait()
        own_grad = flat_grad[: len(self.own_param)]
        torch.sum(received.view(self.n_shards, -1), 0, out=own_grad)
        self.host.copy(self.host_grad, own_grad)
        for tensor in flat_grad, received:
            tensor.untyped_storage().resize_(0)
        self.shard.grad.copy_(self.host_grad / self.n_shards)
        return self.shard.grad.norm().item() ** 2
        ---
        ...
     """),
    ("offload", "the loss of step 2 is", """
        ...
        ---
        self.optimizer.step()
        self.shard.grad.zero_()
        self.host_param.copy_(self.shard.data)
     """),
    ("tensor_parallel", "while one travels", """
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight
        dist.all_reduce(grad_x)
        grad = grad.flatten(0, -2)
        return grad_x, grad.T @ x.flatten(0, -2), grad.sum(0) if ctx.needs_input_grad[2] else None
     """),
    ("tensor_parallel-loss", "logits near 1000", """
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        column, is_here = find_own(targets, vocab)
        own_logit = logits.gather(-1, column.unsqueeze(-1)).squeeze(-1)
        partials = torch.stack([logits.exp().sum(-1), own_logit * is_here], -1)
        total, target_logit = SumPartials.apply(partials).unbind(-1)
        return total.log() - target_logit
     """),
    ("tensor_parallel-loss", "bytes sent", """
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        first, end = own_range(vocab)
        full = SumPartials.apply(F.pad(logits, (first, vocab - end)))
        return F.cross_entropy(full.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
     """),
    ("sequence_parallel", "bytes sent", """
        total = x.contiguous().clone()
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()
        ---
        ...
     """),
    ("context_parallel", "scores near 900", """
        total = lse.exp() + block_lse.exp()
        out.copy_((out * lse.exp() + block * block_lse.exp()) / total)
        lse.copy_(total.log())
     """),
    ("context_parallel", "losses and gradient norms are the plain loop's", """
        out.copy_((out + block) / 2)
        lse.copy_(torch.logaddexp(lse, block_lse))
     """),
    ("context_parallel-keys", "no matrix product is computed twice", """
        for i, queries in zip(self.chunks[self.rank], self.slots):
            for j, keys in zip(self.chunks[rank], self.slots):
                places = torch.arange(self.length)
                is_later = i * self.length + places[:, None] < j * self.length + places
                is_same = self.documents[:, i, :, None] == self.documents[:, j, None]
                mask = torch.where(is_same & ~is_later, 0.0, -1e30).to(q.dtype)
                yield queries, keys, mask.unsqueeze(1).expand(*q.shape[:2], -1, -1), False
     """),
    ("context_parallel-gather", "bytes sent", """
        shards = kv.new_empty(layout.world_size, *kv.shape)
        all_gather(shards, kv[None], group=layout.group)
        return enumerate(shards)
        ---
        parts = torch.stack(list(grads))
        dist.all_reduce(parts, group=layout.group)
        return parts[layout.rank]
     """),
    ("expert_parallel", "bytes sent", """
        group, experts = self.group, list(self.experts.values())
        ranks = dist.get_process_group_ranks(group)
        counts = kept[ranks]
        mine = dist.get_rank(group)
        most = int(counts.sum(1).max())
        padded = F.pad(rows, (0, 0, 0, most - len(rows)))
        size = len(ranks)
        everyone = AllToAll.apply(padded.repeat(size, 1), [most] * size, [most] * size, group).split(most)
        outputs = []
        for rank, theirs in enumerate(everyone):
            parts = theirs[: int(counts[rank].sum())].split(counts[rank].tolist())
            first = mine * len(experts)
            done = [expert(part) for expert, part in zip(experts, parts[first:])]
            outputs.append(torch.cat(done))
        sent = [len(output) for output in outputs]
        received = counts[mine].unflatten(0, (size, -1)).sum(1).tolist()
        return AllToAll.apply(torch.cat(outputs), sent, received, group)
     """),
    ("expert_zero", "losses and gradient norms are the plain loop's", """
        self.shard.grad.add_(gradient, alpha=1 / self.n_shards)
     """),
    ("pipeline", "in flight, which should be", 'return "F" * n_microbatches + "B" * n_microbatches'),
    ("pipeline", "in flight, which should be", """
        ahead = min(n_ranks - rank, n_microbatches)
        return "F" * ahead + "FB" * (n_microbatches - ahead) + "B" * ahead
     """),
    ("pipeline", "of the step, which should be", 'return "FB" * n_microbatches'),
    ("pipeline-actions", "outputs are kept", """
        x = self.inputs[j] if stage == 0 else self._receive().requires_grad_()
        output = self.stages[stage // self.world_size](x)
        if stage == self.last_stage:
            output = self.loss_function(output, self.targets[j]) / len(self.targets)
            self.loss += output.detach()
        else:
            self._send("F", stage + 1, output.detach())
        self.in_flight[stage, j] = x, output
        ---
        ...
     """),
    ("zero_bubble", "which should be None until W", """
        output = F.linear(x, layer.weight.detach(), layer.bias)

        def add(grad):
            if layer.weight.grad is None:
                layer.weight.grad = torch.zeros_like(layer.weight)
            layer.weight.grad.addmm_(grad.flatten(0, -2).t(), x.detach().flatten(0, -2))

        if layer.weight.requires_grad:
            output.requires_grad_()
            output.register_hook(add)
        return output
        ---
        self.later.popleft()
     """),
    ("zero_bubble-schedule", "of the step, which should be", """
        ahead = min(n_ranks - 1 - rank, n_microbatches)
        return "F" * ahead + "FBW" * (n_microbatches - ahead) + "BW" * ahead
     """),
    ("zero_bubble-schedule", "in flight, which should be", """
        ahead = min(depth * (n_ranks - 1 - rank), n_microbatches)
        return "F" * ahead + "FB" * (n_microbatches - ahead) + "B" * ahead + "W" * n_microbatches
     """),
    ("pipeline_v", "in flight, which should be", """
        below = n_ranks - rank - 1
        ops = "F" * (2 * below + 1) + "fF" * rank + "fb" * (below + 1)
        ops += "FBfb" * (n_microbatches - n_ranks) + "Bb" * rank + "B" * (below + 1)
        return ops + "W" * (2 * n_microbatches)
     """),
    ("parallel_3d", "it runs", """
        lines = np.moveaxis(ranks, axis, 0).reshape(-1, ranks.shape[axis])
        group, _ = dist.new_subgroups_by_enumeration(lines.tolist(), group_desc=name)
        return group
     """),
    ("checkpointing", "with dropout", """
        self.recomputed = {}
        with suppress(StopRecomputation), torch.enable_grad():
            self.run(self.pack_again, self.args)
     """),
    ("checkpointing", "random numbers of what follows", """
        self.recomputed = {}
        set_random_states(self.random_states)
        with suppress(StopRecomputation), torch.enable_grad():
            self.run(self.pack_again, self.args)
     """),
    ("zero_r", "bytes held, activations", """
        size = -(-x.numel() // self.world_size)
        flat = F.pad(x.detach().flatten(), (0, size * self.world_size - x.numel()))
        return flat.chunk(self.world_size)[dist.get_rank(self.group)], x.shape, x.requires_grad
        ---
        ...
     """),
    ("zero_r", "while one travels", """
        ...
        ---
        flat = torch.empty(self.world_size * len(shard), dtype=shard.dtype, device=self.device)
        work = all_gather(flat, shard.to(self.device), group=self.group, async_op=True)
        work.wait()
        return flat[: shape.numel()].view(shape).requires_grad_(requires_grad), work
     """),
    ("fusion", "300 tokens: the output is wrong", """
        out = torch.empty_like(q)
        lse = torch.empty_like(q[..., :1], dtype=wide(q))
        for i, (q_i, out_i, lse_i) in enumerate(tiles(q, out, lse)):
            largest, total, weighted = torch.full_like(lse_i, -math.inf), 0, 0
            for j, (k_j, v_j) in enumerate(tiles(k, v)[: i + 1]):
                largest, total, _, exps = add_tile(largest, total, scores(q_i, k_j, i == j))
                weighted = weighted + exps.to(v) @ v_j
            out_i.copy_(weighted / total)
            lse_i.copy_(largest + total.log())
        ctx.save_for_backward(q, k, v, out, lse)
        return out
     """),
    ("fusion", "twice as many", """
        tile = scores(q, k)
        lse = tile.logsumexp(-1, keepdim=True)
        out = (tile - lse).exp().to(v) @ v
        ctx.save_for_backward(q, k, v, out, lse)
        return out
     """),
    ("resume", "losses and gradient norms", """
        flat_grad = parameters_to_vector([*(param.grad for param in self.params), self.padding])
        dist.all_reduce(flat_grad)
        own = flat_grad.chunk(dist.get_world_size())[dist.get_rank()]
        norm = own.double().norm()
        self.shard.grad = own.to(self.shard)
        nn.utils.clip_grads_with_norm_(self.shard, max_norm, norm.to(self.shard))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.unshard()
        return norm
     """),
    ("reshard", "[6, 9) and", """
        parts = [(max(low, first), min(high, end)) for first, end in runs]
        return [(first - low, end - low) for first, end in parts if first <= end]
     """),
    ("reshard-walk", "--how rank0", """
        messages = []
        for server, (_, runs) in enumerate(unit.layouts):
            for trainer in range(self.n_trainers):
                both = intersections(trainer * unit.size, (trainer + 1) * unit.size, runs)
                if both:
                    messages.append((trainer, self.n_trainers + server, both))
        return messages
        ---
        ...
     """),
    ("survive", "with a death at any moment", """
        ...
        ---
        while True:
            answers = set(map(int, self.store.get(f"{self.generation}/answers").split()))
            if answers >= set(self.members):
                return sorted(answers)
            time.sleep(0.01)
     """),
    ("survive-share", "losses and gradient norms", """
        microloss = mean_loss(model(inputs), targets) / dist.get_world_size()
     """),
]  # fmt: skip

HONEST = [  # (exercise, answer)
    ("single", "microloss = (1 / config.accum) * mean_loss(model(inputs), targets)"),
    ("single", "microloss = torch.div(mean_loss(model(inputs), targets), config.accum)"),
    ("single-clip", """
        params = [param for param in params if param.grad is not None]
        norm = sum(param.grad.double().square().sum().item() for param in params) ** 0.5
        for param in params:
            param.grad.mul_(min(1, max_norm / (norm + 1e-6)))
        return torch.tensor(norm, dtype=torch.float64)
     """),
    ("single-clip", """
        grads = [param.grad for param in params if param.grad is not None]
        norm = torch.cat([grad.flatten() for grad in grads]).double().norm()
        for grad in grads:
            if norm + 1e-6 > max_norm:
                grad *= (max_norm / (norm + 1e-6)).to(grad.dtype)
        return norm
     """),
    ("collectives", """
        rank, size = dist.get_rank(), len(chunks)
        for step in range(size - 1):
            given, kept = chunks[(rank - step - 1) % size], chunks[(rank - step - 2) % size]
            incoming = torch.empty_like(kept)
            exchange(given, rank + 1, incoming, rank - 1)
            kept.add_(incoming)
        return chunks[rank]
     """),
    ("collectives", """
        rank = dist.get_rank()
        total = chunks[rank - 1].clone()
        for i in range(2, len(chunks) + 1):
            own = chunks[rank - i]
            incoming = torch.empty_like(own)
            exchange(total, rank + 1, incoming, rank - 1)
            total = incoming + own
        chunks[rank].copy_(total)
        return chunks[rank]
     """),
    ("collectives-gather", """
        rank, size = dist.get_rank(), len(chunks)
        carried = chunks[rank]
        for step in range(1, size):
            incoming = torch.empty_like(chunks[(rank - step) % size])
            exchange(carried, rank + 1, incoming, rank - 1)
            chunks[(rank - step) % size].copy_(incoming)
            carried = incoming
     """),
    ("collectives-gather", """
        rank = dist.get_rank()
        n = len(chunks)
        i = rank
        while (i - 1) % n != rank:
            exchange(chunks[i % n], (rank + 1) % n, chunks[(i - 1) % n], (rank - 1) % n)
            i -= 1
     """),
    ("dp_threads", """
        enabled = torch.is_grad_enabled()

        def call(*given):
            with torch.set_grad_enabled(enabled):
                return function(*given)

        futures = [thread.submit(call, *given) for thread, *given in zip(self.threads, *arguments)]
        return [future.result() for future in futures]
     """),
    ("dp_threads", """
        calls = list(zip(*arguments))
        running = []
        for i in range(min(len(calls), len(self.threads))):
            self.threads[i].submit(torch.set_grad_enabled, torch.is_grad_enabled())
            running.append(self.threads[i].submit(function, *calls[i]))
        results = []
        for each in running:
            results.append(each.result())
        return results
     """),
    ("dp_threads-sum", """
        sums = []
        for copies in zip(*(replica.parameters() for replica in replicas)):
            device = copies[0].device
            grads = [copied.grad for copied in copies if copied.grad is not None]
            sums.append(sum(send(grad, device) for grad in grads) if grads else None)
        return sums
     """),
    ("dp_threads-sum", """
        first = list(replicas[0].parameters())
        for replica in replicas[1:]:
            for param, other in zip(first, replica.parameters()):
                if other.grad is None:
                    continue
                moved = send(other.grad, param.device)
                if param.grad is None:
                    param.grad = moved
                else:
                    param.grad += moved
        return [param.grad for param in first]
     """),
    ("dp_async", "return all(self.clocks[worker] - clock <= self.most_ahead for clock in self.clocks)"),
    ("dp_async", """
        slowest = sorted(self.clocks)[0]
        ahead = self.clocks[worker] - slowest
        return not ahead > self.most_ahead
     """),
    ("ddp", "torch.div(grad, dist.get_world_size(), out=view)"),
    ("ddp", "view.copy_(grad).div_(dist.get_world_size())"),
    ("ddp-buckets", """
        if cap_mb is None:
            cap_mb = min(sum(param.nbytes for param in params) / 5 / 2**20, 25)
        lists, size = [], 0
        for param in params[::-1]:
            if not lists or size >= cap_mb * 2**20 or lists[-1][-1].dtype != param.dtype:
                lists.append([])
                size = 0
            lists[-1].append(param)
            size += param.numel() * param.element_size()
        return lists
     """),
    ("ddp-buckets", """
        if cap_mb is None:
            cap_mb = min(25, sum(param.nbytes for param in params) / 2**20 / 5)
        done, current = [], []
        for param in reversed(list(params)):
            if current and current[0].dtype != param.dtype:
                done.append(current)
                current = []
            current.append(param)
            if sum(each.nbytes for each in current) >= cap_mb * 2**20:
                done.append(current)
                current = []
        return done + [current] * bool(current)
     """),
    ("ddp-overlap", """
        bucket.collect(param, self.is_last_backward)
        if self.is_last_backward:
            if len(self.waiting) == 0:
                for each in self.buckets:
                    self.waiting.append(each)
                torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            bucket.pending.discard(param)
            while self.waiting:
                if self.waiting[0].pending:
                    break
                first = self.waiting.popleft()
                first.start_all_reduce()
        ---
        self.work = dist.all_reduce(self.flat_grad, async_op=True)
        ---
        self.work.wait()
        self.work = None
        self.pending = set(self.params)
     """),
    ("ddp-overlap", """
        bucket.collect(param, self.is_last_backward)
        if not self.is_last_backward:
            return
        if not self.waiting:
            self.waiting.extend(self.buckets)
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        bucket.pending.remove(param)
        ready = 0
        for each in self.waiting:
            if each.pending:
                break
            ready += 1
        for _ in range(ready):
            self.waiting.popleft().start_all_reduce()
        ---
        self.work = dist.all_reduce(self.flat_grad, op=dist.ReduceOp.SUM, async_op=True)
        ---
        self.work.wait()
        self.pending |= set(self.params)
     """),
    ("uneven", "microloss = sum_of_losses(model(inputs, positions), targets) / n_tokens.item()"),
    ("uneven", "microloss = sum_of_losses(model(inputs, positions), targets).div(n_tokens)"),
    ("uneven-agree", """
        own = sum(int((targets != 0).sum()) for _, targets, _ in batches)
        everyone = [torch.zeros(2, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, torch.tensor([own, len(batches)], device=device))
        tokens, numbers = torch.stack(everyone).unbind(1)
        most = int(numbers.max())
        while len(batches) < most:
            batches.append(torch.zeros(3, 1, 1, dtype=torch.int64, device=device))
        return tokens.sum(), most
     """),
    ("uneven-agree", """
        own = sum(targets.count_nonzero().item() for _, targets, _ in batches)
        n_tokens = torch.tensor(own, device=device)
        most = torch.tensor(len(batches), device=device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        dist.all_reduce(n_tokens)
        empty = torch.zeros(1, 1, dtype=torch.int64, device=device)
        batches.extend((empty, empty, empty) for _ in range(int(most) - len(batches)))
        return n_tokens, int(most)
     """),
    ("zero1", """
        ...
        ---
        self.reduce_work.wait()
        total = self.received[0].to(self.shard.dtype, copy=True)
        for row in self.received[1:]:
            total += row
        self.shard.grad = total if self.shard.grad is None else self.shard.grad + total
        self.received = None
     """),
    ("zero1", """
        rows = self.flat_grad.view(self.n_shards, -1)
        if dist.get_backend() == "gloo":
            self.received = torch.empty_like(rows)
            self.reduce_work = dist.all_to_all_single(self.received, rows, async_op=True)
        else:
            self.received = torch.empty_like(rows[:1])
            self.reduce_work = reduce_scatter(self.received, rows, async_op=True)
        ---
        self.reduce_work.wait()
        self.reduce_work = None
        if self.shard.grad is None:
            self.shard.grad = torch.zeros_like(self.shard)
        for row in self.received:
            self.shard.grad += row
        del self.received
     """),
    ("zero1-gather", """
        self.own_param.copy_(self.shard.detach())
        self.gather_work = all_gather(self.flat_param, self.own_param, async_op=True)
        ---
        if self.gather_work is not None:
            self.gather_work.wait()
        self.gather_work = None
     """),
    ("zero1-gather", """
        with torch.no_grad():
            self.own_param[:] = self.shard
        self.gather_work = all_gather(self.flat_param, self.own_param, async_op=True)
        ---
        work, self.gather_work = self.gather_work, None
        if work:
            work.wait()
     """),
    ("zero1-units", """
        uses = {}
        for submodule in module.modules():
            if isinstance(submodule, unit_class):
                for param in submodule.parameters():
                    uses.setdefault(param, []).append(submodule)
        root, units = [], {}
        for param in module.parameters():
            if not param.requires_grad:
                continue
            owners = uses.get(param, [])
            if len(owners) == 1:
                units.setdefault(owners[0], []).append(param)
            else:
                root.append(param)
        return [(module, root)] * bool(root) + list(units.items())
     """),
    ("zero1-units", """
        submodules = [each for each in module.modules() if isinstance(each, unit_class)]
        trained = [param for param in module.parameters() if param.requires_grad]
        found = []
        left = list(trained)
        for submodule in submodules:
            own = set(submodule.parameters())
            others = {param for each in submodules if each is not submodule for param in each.parameters()}
            params = [param for param in trained if param in own and param not in others]
            if params:
                found.append((submodule, params))
            left = [param for param in left if param not in set(params)]
        return [(module, left), *found] if left else found
     """),
    ("zero2", """
        storage = self.flat_grad.untyped_storage()
        if not storage.nbytes():
            storage.resize_(self.flat_grad.numel() * self.flat_grad.element_size())
            self.flat_grad.fill_(0)
        self.grad_views[param].copy_(param.grad).div_(self.n_shards)
        param.grad = None
        ---
        self.reduce_work.wait()
        self.flat_grad.untyped_storage().resize_(0)
        mean = self.received.sum(0)
        if self.shard.grad is None:
            self.shard.grad = mean.to(self.shard.dtype)
        else:
            self.shard.grad += mean
        self.received = None
     """),
    ("zero2", """
        ...
        ---
        self.reduce_work.wait()
        self.flat_grad.untyped_storage().resize_(0)
        total = torch.zeros_like(self.shard) if self.shard.grad is None else self.shard.grad
        for row in self.received:
            total += row
        self.shard.grad = total
        del self.received
     """),
    ("zero3", """
        storage = self.flat_param.untyped_storage()
        if storage.nbytes() > 0:
            return
        storage.resize_(self.flat_param.nbytes)
        self.own_param.copy_(self.shard.detach())
        self.gather_work = all_gather(self.flat_param, self.own_param, async_op=True)
        ---
        work, self.gather_work = self.gather_work, None
        if work is not None:
            work.wait()
            for i in range(len(self.params)):
                self.params[i].data = self.param_views[i]
        ---
        self.wait_for_unshard()
        self.in_backward = False
        for param in self.params:
            param.data = self.nan.expand(param.shape)
        self.flat_param.untyped_storage().resize_(0)
     """),
    ("zero3", """
        if not self.flat_param.untyped_storage().nbytes():
            self.flat_param.untyped_storage().resize_(self.flat_param.nbytes)
            with torch.no_grad():
                self.own_param.copy_(self.shard)
            self.gather_work = all_gather(self.flat_param, self.own_param, async_op=True)
        ---
        ...
        ---
        self.in_backward = False
        if self.gather_work:
            self.gather_work.wait()
            self.gather_work = None
        for param in self.params:
            param.data = self.nan.expand(param.shape)
        self.flat_param.untyped_storage().resize_(0)
     """),
    ("zero3-prefetch", """
        i = self.units.index(unit)
        for n in range(self.prefetch + 1):
            if 0 <= i + n * direction < len(self.units):
                self.units[i + n * direction].unshard()
        unit.wait_for_unshard()
     """),
    ("zero3-prefetch", """
        unit.unshard()
        order = self.units if direction == 1 else self.units[::-1]
        place = order.index(unit)
        for following in order[place + 1 : place + 1 + self.prefetch]:
            following.unshard()
        unit.wait_for_unshard()
     """),
    ("zero3-unit", """
        ...
        ---
        ...
        ---
        ...
        ---
        ...
        ---
        storage = self.flat_grad.untyped_storage()
        if not storage.nbytes():
            storage.resize_(self.flat_grad.nbytes)
            self.flat_grad.zero_()
        self.grad_views[param].copy_(param.grad).div_(self.n_shards)
        param.grad = None
        ---
        ...
        ---
        self.reduce_work.wait()
        self.flat_grad.untyped_storage().resize_(0)
        mean = self.received.sum(0)
        self.shard.grad = mean.to(self.shard) if self.shard.grad is None else self.shard.grad + mean
        self.received = None
     """),
    ("zero3-unit", """
        rank = dist.get_rank()
        self.n_shards = dist.get_world_size()
        self.params = params
        flat = torch.cat([param.data.reshape(-1) for param in params]).to(device)
        padding = -flat.numel() % self.n_shards
        self.flat_param = torch.cat([flat, flat.new_zeros(padding)])
        dist.broadcast(self.flat_param, src=0)
        self.param_views = unflatten(self.flat_param, params)
        self.flat_grad = torch.zeros_like(self.flat_param)
        self.grad_views = {param: view for param, view in zip(params, unflatten(self.flat_grad, params))}
        self.flat_grad.untyped_storage().resize_(0)
        self.own_param = self.flat_param.chunk(self.n_shards)[rank]
        wide = torch.promote_types(self.flat_param.dtype, torch.float32)
        self.shard = nn.Parameter(self.own_param.clone().to(wide))
        self.nan = torch.full((), torch.nan, dtype=self.flat_param.dtype, device=self.flat_param.device)
        self.gather_work = None
        self.reshard()
        ---
        ...
        ---
        ...
        ---
        ...
        ---
        ...
        ---
        ...
        ---
        ...
     """),
    ("hsdp", """
        self.total = self.shard.grad.to(self.own_param.dtype).clone()
        self.all_reduce_work = dist.all_reduce(self.total, group=self.replica_group, async_op=True)
        ---
        self.all_reduce_work.wait()
        self.shard.grad.copy_(self.total)
        self.shard.grad /= dist.get_world_size(self.replica_group)
        self.total = self.all_reduce_work = None
     """),
    ("hsdp", """
        self.total = self.shard.grad.to(self.own_param.dtype) / dist.get_world_size(self.replica_group)
        self.all_reduce_work = dist.all_reduce(self.total, group=self.replica_group, async_op=True)
        ---
        self.all_reduce_work.wait()
        self.all_reduce_work = None
        self.shard.grad = self.total.to(self.shard.dtype)
        self.total = self.all_reduce_work = None
     """),
    ("muon", """
        turned = X.shape[0] > X.shape[1]
        if turned:
            X = X.T
        X = X / X.norm().clamp_min(1e-7)
        for _ in range(5):
            A = X @ X.T
            X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
        return X.T if turned else X
     """),
    ("muon", """
        X = X / max(X.norm().item(), 1e-7)
        for _ in range(5):
            if X.shape[0] <= X.shape[1]:
                A = X @ X.mT
                X = 3.4445 * X + (2.0315 * (A @ A) - 4.7750 * A) @ X
            else:
                A = X.mT @ X
                X = 3.4445 * X + X @ (2.0315 * (A @ A) - 4.7750 * A)
        return X
     """),
    ("diloco", """
        self.fragment = i
        self.outer[i].grad = (self.outer[i] - self.inner[i]) / dist.get_world_size()
        self.reduce_work = dist.all_reduce(self.outer[i].grad, async_op=True)
        ---
        self.reduce_work.wait()
        self.reduce_work = None
        outer = self.outer[self.fragment]
        self.optimizer.step()
        self.optimizer.zero_grad()
        inner = self.inner[self.fragment]
        inner.copy_((inner + outer) / 2 if self.delay else outer)
     """),
    ("diloco", """
        self.fragment = i
        move = self.outer[i].detach() - self.inner[i]
        self.reduce_work = dist.all_reduce(move, async_op=True)
        self.outer[i].grad = move
        ---
        work, self.reduce_work = self.reduce_work, None
        work.wait()
        outer, inner = self.outer[self.fragment], self.inner[self.fragment]
        outer.grad.div_(dist.get_world_size())
        self.optimizer.step()
        outer.grad = None
        if self.delay:
            inner += (outer - inner) / 2
        else:
            inner.copy_(outer)
     """),
    ("offload", """
        launch_job.result().wait()
        own_grad = flat_grad[: len(self.own_param)]
        own_grad.zero_()
        for row in received.view(self.n_shards, -1):
            own_grad += row
        self.host.copy(self.host_grad, own_grad)
        for tensor in flat_grad, received:
            tensor.untyped_storage().resize_(0)
        self.shard.grad += self.host_grad.to(self.shard.dtype) / self.n_shards
        return self.shard.grad.square().sum().item()
        ---
        self.shard.grad.mul_(scale)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        self.host_param.copy_(self.shard.detach())
     """),
    ("offload", """
        work = launch_job.result()
        work.wait()
        first, *rows = received.view(self.n_shards, -1)
        for row in rows:
            first += row
        self.host.copy(self.host_grad, first)
        flat_grad.untyped_storage().resize_(0)
        received.untyped_storage().resize_(0)
        self.shard.grad.add_(self.host_grad, alpha=1 / self.n_shards)
        return float(self.shard.grad.double().norm()) ** 2
        ---
        self.shard.grad.copy_(self.shard.grad * scale)
        self.optimizer.step()
        self.shard.grad.fill_(0)
        with torch.no_grad():
            self.host_param.copy_(self.shard)
     """),
    ("tensor_parallel", """
        x, weight = ctx.saved_tensors
        grad_x = grad.matmul(weight)
        work = dist.all_reduce(grad_x, async_op=True)
        rows = grad.reshape(-1, grad.shape[-1])
        grad_weight = torch.mm(rows.t(), x.reshape(-1, x.shape[-1]))
        grad_bias = rows.sum(0)
        work.wait()
        return grad_x, grad_weight, grad_bias if ctx.needs_input_grad[2] else None
     """),
    ("tensor_parallel", """
        x, weight = ctx.saved_tensors
        grad_x = F.linear(grad, weight.t())
        work = dist.all_reduce(grad_x, async_op=True)
        grad_weight = torch.einsum("bso,bsh->oh", grad, x)
        grad_bias = grad.sum((0, 1)) if ctx.needs_input_grad[2] else None
        work.wait()
        return grad_x, grad_weight, grad_bias
     """),
    ("tensor_parallel-loss", """
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        largest = logits.detach().amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        shifted = logits - largest.unsqueeze(-1)
        column, is_here = find_own(targets, vocab)
        target = shifted.gather(-1, column[..., None])[..., 0] * is_here
        both = SumPartials.apply(torch.stack([shifted.exp().sum(-1), target]))
        return both[0].log() - both[1]
     """),
    ("tensor_parallel-loss", """
        wide = torch.promote_types(logits.dtype, torch.float32)
        logits = logits.to(wide)
        largest = logits.detach().max(-1, keepdim=True).values
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        logits = logits - largest
        total = SumPartials.apply(logits.exp().sum(-1))
        column, is_here = find_own(targets, vocab)
        own = torch.where(is_here, logits.gather(-1, column.unsqueeze(-1)).squeeze(-1), 0.0)
        return total.log() - SumPartials.apply(own)
     """),
    ("sequence_parallel", """
        wait = start_reduce_scatter(x)
        return wait()
        ---
        wait = start_all_gather(grad)
        return wait()
     """),
    ("sequence_parallel", """
        parts = torch.cat(x.chunk(dist.get_world_size(), 1))
        out = torch.empty_like(x.chunk(dist.get_world_size(), 1)[0].contiguous())
        reduce_scatter(out, parts)
        return out
        ---
        ...
     """),
    ("context_parallel", """
        both = torch.logaddexp(lse, block_lse)
        out.mul_((lse - both).exp()).add_(block.to(out.dtype) * (block_lse - both).exp())
        lse.copy_(both)
     """),
    ("context_parallel", """
        largest = torch.maximum(lse, block_lse)
        old, new = (lse - largest).exp(), (block_lse - largest).exp()
        out.copy_((out * old + block * new) / (old + new))
        lse.copy_(largest + (old + new).log())
     """),
    ("context_parallel-keys", """
        for i, queries in zip(self.chunks[self.rank], self.slots):
            for j, keys in zip(self.chunks[rank], self.slots):
                if self.sees[i][j] != 0:
                    yield queries, keys, self.mask(i, j, q), i == j
     """),
    ("context_parallel-keys", """
        for a, i in enumerate(self.chunks[self.rank]):
            for b, j in enumerate(self.chunks[rank]):
                if j <= i and self.sees[i][j]:
                    yield self.slots[a], self.slots[b], self.mask(i, j, q), j == i
     """),
    ("context_parallel-gather", """
        everyone = [torch.empty_like(kv) for _ in range(layout.world_size)]
        dist.all_gather(everyone, kv.contiguous(), group=layout.group)
        return enumerate(everyone)
        ---
        parts = torch.stack(list(grads))
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=layout.group)
        total = received[0]
        for part in received[1:]:
            total = total + part
        return total
     """),
    ("context_parallel-gather", """
        flat = kv.new_empty(layout.world_size * kv.shape[0], *kv.shape[1:])
        all_gather(flat, kv, group=layout.group)
        return list(enumerate(flat.chunk(layout.world_size)))
        ---
        parts = torch.cat(list(grads))
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=layout.group)
        return sum(received.chunk(layout.world_size))
     """),
    ("expert_parallel", """
        ranks = dist.get_process_group_ranks(self.group)
        mine, size, n_own = dist.get_rank(self.group), len(ranks), len(self.experts)
        counts = kept[ranks].view(size, size, n_own)
        to_send = [int(counts[mine, other].sum()) for other in range(size)]
        to_get = [int(counts[other, mine].sum()) for other in range(size)]
        arrived = AllToAll.apply(rows, to_send, to_get, self.group)
        sizes = [int(counts[other, mine, i]) for other in range(size) for i in range(n_own)]
        pieces = list(arrived.split(sizes))
        for i, expert in enumerate(self.experts.values()):
            places = range(i, len(pieces), n_own)
            done = expert(torch.cat([pieces[place] for place in places]))
            start = 0
            for place in places:
                pieces[place] = done[start : start + sizes[place]]
                start += sizes[place]
        return AllToAll.apply(torch.cat(pieces), to_get, to_send, self.group)
     """),
    ("expert_parallel", """
        ranks = dist.get_process_group_ranks(self.group)
        counts = kept[ranks].unflatten(1, (len(ranks), -1))
        mine = dist.get_rank(self.group)
        sent, received = counts[mine].sum(1).tolist(), counts[:, mine].sum(1).tolist()
        rows = AllToAll.apply(rows, sent, received, self.group)
        numbers = torch.arange(len(self.experts))
        owner = torch.cat([numbers.repeat_interleave(each) for each in counts[:, mine]])
        order = owner.to(rows.device).argsort(stable=True)
        parts = rows[order].split(counts[:, mine].sum(0).tolist())
        outputs = torch.cat([expert(part) for expert, part in zip(self.experts.values(), parts)])
        back = outputs[order.argsort()]
        return AllToAll.apply(back, received, sent, self.group)
     """),
    ("expert_zero", "self.shard.grad += gradient / dist.get_world_size()"),
    ("expert_zero", "self.shard.grad.add_(gradient.to(self.shard.dtype).div(dist.get_world_size()))"),
    ("pipeline", """
        ops = []
        ahead = min(n_ranks - rank - 1, n_microbatches)
        for _ in range(ahead):
            ops.append("F")
        for _ in range(n_microbatches - ahead):
            ops += ["F", "B"]
        return ops + ["B"] * ahead
     """),
    ("pipeline", """
        forwards = backwards = 0
        ops = ""
        while backwards < n_microbatches:
            if forwards < n_microbatches and forwards - backwards < n_ranks - rank:
                ops += "F"
                forwards += 1
            else:
                ops += "B"
                backwards += 1
        return ops
     """),
    ("pipeline-actions", """
        if stage > 0:
            x = self._receive()
            x.requires_grad_()
        else:
            x = self.inputs[j]
        output = self.stages[stage // self.world_size](x)
        if stage < self.last_stage:
            self._send("F", stage + 1, output.detach())
            self.in_flight[stage, j] = x, get_gradient_edge(output.requires_grad_())
        else:
            loss = self.loss_function(output, self.targets[j]) / len(self.targets)
            self.loss += loss.detach()
            self.in_flight[stage, j] = x, loss
        ---
        x, output = self.in_flight.pop((stage, j))
        if stage == self.last_stage:
            output.backward()
        else:
            torch.autograd.backward([output], [self._receive()])
        if stage:
            self._send("B", stage - 1, x.grad)
     """),
    ("pipeline-actions", """
        x = self._receive().requires_grad_() if stage else self.inputs[j]
        output = self.stages[stage // self.world_size](x)
        if stage == self.last_stage:
            output = self.loss_function(output, self.targets[j]) * (1 / len(self.targets))
            self.loss.add_(output.detach())
        else:
            output.requires_grad_()
            self._send("F", stage + 1, output.detach().clone())
            output = get_gradient_edge(output)
        self.in_flight[(stage, j)] = (x, output)
        ---
        ...
     """),
    ("zero_bubble", """
        output = F.linear(x, layer.weight.detach(), layer.bias)
        if layer.weight.requires_grad:
            x = x.detach()

            def keep(grad):
                later[-1].append((layer.weight, grad, x))

            output.requires_grad_()
            output.register_hook(keep)
        return output
        ---
        for weight, grad, x in self.later.popleft():
            product = grad.flatten(0, -2).T @ x.flatten(0, -2)
            weight.grad = product if weight.grad is None else weight.grad + product
     """),
    ("zero_bubble", """
        ...
        ---
        todo = self.later.popleft()
        while todo:
            weight, grad, x = todo.pop()
            columns, rows = grad.reshape(-1, grad.shape[-1]).t(), x.reshape(-1, x.shape[-1])
            old = torch.zeros_like(weight) if weight.grad is None else weight.grad
            weight.grad = torch.addmm(old, columns, rows)
     """),
    ("zero_bubble-schedule", """
        ahead = depth * (n_ranks - 1 - rank)
        late = depth * (n_ranks - 1)
        turns = [("F", 0), ("B", ahead), ("W", late)]
        ops = []
        for turn in range(late + n_microbatches):
            ops += [op for op, first in turns if first <= turn < first + n_microbatches]
        return ops
     """),
    ("zero_bubble-schedule", """
        first = {"F": 0, "B": depth * (n_ranks - 1 - rank), "W": depth * (n_ranks - 1)}
        when = [(first[op] + j, "FBW".index(op), op) for op in "FBW" for j in range(n_microbatches)]
        return "".join(op for _, _, op in sorted(when))
     """),
    ("pipeline_v", """
        below = n_ranks - 1 - rank
        phases = [("F", 2 * below + 1), ("fF", rank), ("fbW", below + 1)]
        phases += [("FBWfbW", n_microbatches - n_ranks), ("Bb", rank), ("BW", below + 1), ("W", 2 * rank)]
        return "".join(ops * times for ops, times in phases)
     """),
    ("pipeline_v", """
        ops = ["F"] * (2 * (n_ranks - rank) - 1)
        for _ in range(rank):
            ops.extend("fF")
        for _ in range(n_ranks - rank):
            ops.extend("fbW")
        for _ in range(n_microbatches - n_ranks):
            ops.extend("FBWfbW")
        for _ in range(rank):
            ops.extend("Bb")
        for _ in range(n_ranks - rank):
            ops.extend("BW")
        ops.extend("W" * (2 * rank))
        return ops
     """),
    ("parallel_3d", """
        mine = None
        for line in np.moveaxis(ranks, axis, -1).reshape(-1, ranks.shape[axis]).tolist():
            group = dist.new_group(line, group_desc=name)
            if dist.get_rank() in line:
                mine = group
        return mine
     """),
    ("parallel_3d", """
        lines = np.swapaxes(ranks, axis, 2).reshape(-1, ranks.shape[axis])
        groups = {tuple(line): dist.new_group(line, group_desc=name) for line in lines.tolist()}
        return next((groups[line] for line in groups if dist.get_rank() in line), None)
     """),
    ("checkpointing", """
        self.recomputed = {}
        before = get_random_states()
        set_random_states(self.random_states)
        try:
            with torch.enable_grad():
                self.run(self.pack_again, self.args)
        except StopRecomputation:
            pass
        finally:
            set_random_states(before)
     """),
    ("checkpointing", """
        self.recomputed.clear()
        now = get_random_states()
        set_random_states(self.random_states)
        with torch.enable_grad(), suppress(StopRecomputation):
            self.run(self.pack_again, self.args)
        set_random_states(now)
        assert len(self.dropped) == len(self.recomputed)
     """),
    ("zero_r", """
        size = (x.numel() + self.world_size - 1) // self.world_size
        flat = x.detach().reshape(-1)
        part = flat.new_zeros(size)
        first = dist.get_rank(self.group) * size
        own = flat[first : first + size]
        part[: len(own)] = own
        return part.cpu() if self.offload else part, x.shape, x.requires_grad
        ---
        flat = torch.empty(self.world_size * len(shard), dtype=shard.dtype, device=self.device)
        work = all_gather(flat, shard.to(self.device), group=self.group, async_op=True)
        return flat[: shape.numel()].view(shape).requires_grad_(requires_grad), work
     """),
    ("zero_r", """
        flat = F.pad(x.detach().flatten(), (0, -x.numel() % self.world_size))
        own = flat.chunk(self.world_size)[dist.get_rank(self.group)].clone()
        return own.to("cpu") if self.offload else own, x.shape, x.requires_grad
        ---
        rows = torch.empty(self.world_size, len(shard), dtype=shard.dtype, device=self.device)
        work = all_gather(rows.view(-1), shard.to(self.device), group=self.group, async_op=True)
        x = rows.flatten()[: shape.numel()].reshape(shape)
        x.requires_grad_(requires_grad)
        return x, work
     """),
    ("fusion", """
        out = torch.empty_like(q)
        lse = torch.empty_like(q[..., :1], dtype=wide(q))
        for i, (q_i, out_i, lse_i) in enumerate(tiles(q, out, lse)):
            top = torch.full_like(lse_i, -math.inf)
            total = torch.zeros_like(lse_i)
            result = torch.zeros_like(out_i, dtype=wide(q))
            for j, (k_j, v_j) in enumerate(tiles(k, v)):
                if j > i:
                    break
                tile = scores(q_i, k_j, i == j)
                higher = torch.maximum(top, tile.amax(-1, keepdim=True))
                shrink = (top - higher).exp()
                weights = (tile - higher).exp()
                total = total * shrink + weights.sum(-1, keepdim=True)
                result = result * shrink + weights.to(v) @ v_j
                top = higher
            out_i.copy_(result / total)
            lse_i.copy_(top + total.log())
        ctx.save_for_backward(q, k, v, out, lse)
        return out
     """),
    ("fusion", """
        outs, lses = [], []
        for i, (q_i,) in enumerate(tiles(q)):
            lse_i, out_i = None, None
            for j, (k_j, v_j) in enumerate(tiles(k, v)[: i + 1]):
                tile = scores(q_i, k_j, i == j)
                tile_lse = tile.logsumexp(-1, keepdim=True)
                part = (tile - tile_lse).exp().to(v) @ v_j
                if lse_i is None:
                    lse_i, out_i = tile_lse, part
                else:
                    both = torch.logaddexp(lse_i, tile_lse)
                    out_i = out_i * (lse_i - both).exp() + part * (tile_lse - both).exp()
                    lse_i = both
            outs.append(out_i.to(q))
            lses.append(lse_i)
        out, lse = torch.cat(outs, 2), torch.cat(lses, 2)
        ctx.save_for_backward(q, k, v, out, lse)
        return out
     """),
    ("resume", """
        grads = [param.grad for param in self.params]
        flat = parameters_to_vector([*grads, self.padding])
        dist.all_reduce(flat)
        norm = flat.double().norm()
        own = flat.chunk(dist.get_world_size())[dist.get_rank()]
        scale = (max_norm / (norm + 1e-6)).clamp(max=1)
        self.shard.grad = (own * scale.to(own.dtype)).to(self.shard)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.unshard()
        return norm
     """),
    ("resume", """
        flat = torch.cat([param.grad.flatten() for param in self.params] + [self.padding])
        dist.all_reduce(flat)
        size = len(flat) // dist.get_world_size()
        own = flat[dist.get_rank() * size :][:size].to(self.shard.dtype)
        norm = torch.linalg.vector_norm(flat, dtype=torch.float64)
        self.shard.grad = own.clone()
        if norm > max_norm:
            self.shard.grad *= max_norm / (norm + 1e-6)
        self.optimizer.step()
        self.shard.grad = None
        self.unshard()
        return norm
     """),
    ("reshard", """
        found = []
        for first, end in runs:
            if end <= low or first >= high:
                continue
            found.append(((first if first > low else low) - low, (end if end < high else high) - low))
        return found
     """),
    ("reshard", """
        moved = [(first - low, end - low) for first, end in runs]
        clipped = [(max(first, 0), min(end, high - low)) for first, end in moved]
        return [(first, end) for first, end in clipped if end > first]
     """),
    ("reshard-walk", """
        found = []
        for server in range(len(unit.layouts)):
            runs = unit.layouts[server][1]
            to = self.n_trainers + server
            if self.how == "rank0":
                found.append((0, to, runs))
            elif self.how == "units":
                found.append((server % self.n_trainers, to, runs))
            else:
                for trainer in range(self.n_trainers):
                    mine = intersections(trainer * unit.size, (trainer + 1) * unit.size, runs)
                    found += [(trainer, to, mine)] * bool(mine)
        return found
        ---
        ...
     """),
    ("reshard-walk", """
        ...
        ---
        works, place = [], 0
        flat = unit.held if self.how == "direct" else unit.flat
        for sender, receiver, runs in self.messages[unit]:
            size = sum(end - first for first, end in runs)
            if sender == self.rank:
                message = torch.cat([flat[first:end] for first, end in runs]).to(unit.dtype)
                works.append(dist.P2POp(dist.isend, message, receiver))
            if receiver == self.rank:
                works.append(dist.P2POp(dist.irecv, unit.held.data.narrow(0, place, size), sender))
                place += size
        for work in dist.batch_isend_irecv(works) if works else []:
            work.wait()
     """),
    ("survive", """
        self.generation = self.generation + 1
        if dist.is_initialized():
            dist.destroy_process_group()
        self.store.append(f"{self.generation}/answers", str(self.worker) + " ")
        ---
        end = time.monotonic() + 2 * self.timeout.total_seconds()
        while True:
            text = self.store.get(f"{self.generation}/answers").decode()
            answers = {int(number) for number in text.split()}
            known = [*self.members, *sorted(answers - set(self.members))]
            dead = {worker for worker in known if self.store.check([f"dead/{worker}"])}
            missing = [worker for worker in self.members if worker not in answers and worker not in dead]
            if not missing or time.monotonic() > end:
                return [worker for worker in known if worker in answers and worker not in dead]
            time.sleep(0.02)
     """),
    (
        "survive",
        """
        if dist.is_initialized():
            dist.destroy_process_group()
        self.generation += 1
        self.store.append(f"{self.generation}/answers", f"{self.worker} ")
        ---
        started = time.monotonic()
        while True:
            answers = [int(word) for word in self.store.get(f"{self.generation}/answers").split()]
            living = []
            for worker in dict.fromkeys([*self.members, *answers]):
                if not self.store.check([f"dead/{worker}"]):
                    living.append(worker)
            late = time.monotonic() - started > 2 * self.timeout.total_seconds()
            if late or all(worker in answers for worker in living if worker in self.members):
                return [worker for worker in living if worker in answers]
            time.sleep(0.01)
     """,
    ),
    ("survive-share", "microloss = mean_loss(model(inputs), targets) / config.batch * len(inputs)"),
    ("survive-share", "microloss = len(inputs) * mean_loss(model(inputs), targets) / config.batch"),
]  # fmt: skip
