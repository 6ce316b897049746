// State of the KV cache: the sequences that hold each block, and the blocks in the prefix cache. It is
// updated by the events of /live, which nanoserve/serve/http/dashboard_state.py describes.

export class Pool {
  constructor() {
    this.clear({ num_blocks: 0 });
  }

  clear(pool) {
    this.numBlocks = pool.num_blocks;
    this.blockSize = pool.block_size;
    this.tables = new Map(); // by arrival number
    this.holders = new Map(); // by block, if in use: arrival numbers, in order of admission
    this.cached = new Set();
    this.fresh = new Set(); // blocks that were allocated by the last event
    this.numCachedFree = 0;
    this.numShared = 0;
  }

  load({ pool, tables, cached }) {
    this.clear(pool);
    for (const [seq, runs] of Object.entries(tables)) this.#extend(Number(seq), blocksIn(runs));
    for (const block of blocksIn(cached)) this.cached.add(block);
    this.fresh.clear(); // a snapshot does not show which blocks were allocated last
    this.#count();
  }

  apply({ tables, ended, cached }) {
    this.fresh.clear();
    for (const seq of ended) {
      this.#cut(seq, 0);
      this.tables.delete(seq);
    }
    for (const [seq, [kept]] of Object.entries(tables)) this.#cut(Number(seq), kept);
    for (const [seq, [, runs]] of Object.entries(tables)) this.#extend(Number(seq), blocksIn(runs));
    for (const block of blocksIn(cached.removed)) this.cached.delete(block);
    for (const block of blocksIn(cached.added)) this.cached.add(block);
    this.#count();
  }

  get numUsed() {
    return this.holders.size;
  }

  #cut(seq, kept) {
    const table = this.tables.get(seq) ?? [];
    for (const block of table.splice(kept)) {
      const left = this.holders.get(block).filter((other) => other !== seq);
      if (left.length) this.holders.set(block, left);
      else this.holders.delete(block);
    }
  }

  #extend(seq, blocks) {
    if (!this.tables.has(seq)) this.tables.set(seq, []);
    const table = this.tables.get(seq);
    for (const block of blocks) {
      table.push(block);
      this.fresh.add(block);
      const known = this.holders.get(block);
      if (known) known.push(seq);
      else this.holders.set(block, [seq]);
    }
  }

  #count() {
    this.numCachedFree = 0;
    for (const block of this.cached) this.numCachedFree += !this.holders.has(block);
    this.numShared = 0;
    for (const seqs of this.holders.values()) this.numShared += seqs.length > 1;
  }
}

// Return the blocks of [first, length, first, length, ...].
export function* blocksIn(runs) {
  for (let i = 0; i < runs.length; i += 2) {
    for (let block = runs[i]; block < runs[i] + runs[i + 1]; block++) yield block;
  }
}
