// Drawing of the KV cache: a cell per block. If there are too many blocks, only those with content are
// drawn, and if these are too many, a cell stands for several blocks.

// Paul Tol's light colours, distinguishable with any colour vision, on light and dark backgrounds.
const PALETTE = ["#77aadd", "#ee8866", "#eedd88", "#ffaabb", "#44bb99", "#bbcc33", "#99ddff", "#aaaa00"];
const SMALLEST = 5; // pixels of a cell with its gap
const LARGEST = 20;
const MOST_HEIGHT = 300;
const FEWEST = 128; // cells for the blocks with content: with fewer, their size would change often
const READABLE = 9; // least pixels of these cells

export const colourOf = (seq) => PALETTE[(seq - 1) % PALETTE.length];

export class PoolCanvas {
  chosen = null; // the sequence whose blocks are highlighted
  selected = null; // the blocks that are drawn, in ascending order; null: all

  constructor(canvas, pool) {
    this.canvas = canvas;
    this.pool = pool;
    this.columns = this.cell = this.perCell = this.numCells = 1;
  }

  // Compute the layout for the available width: the widest cells that the height allows, and if even the
  // smallest ones do not fit, a selection of the blocks, or several blocks per cell.
  #layOut() {
    const width = this.canvas.parentElement.clientWidth;
    this.perCell = 1;
    this.selected = null;
    this.numCells = this.pool.numBlocks;
    if (!this.#fit(width, SMALLEST)) {
      this.selected = this.#withContent(Math.floor(width / READABLE) * Math.floor(MOST_HEIGHT / READABLE));
      if (this.selected) {
        this.numCells = FEWEST;
        while (this.numCells < this.selected.length) this.numCells *= 2;
      }
      if (!this.selected || !this.#fit(width, SMALLEST)) {
        this.selected = null;
        const rows = Math.floor(MOST_HEIGHT / SMALLEST);
        this.perCell = Math.ceil(this.pool.numBlocks / (Math.max(1, Math.floor(width / SMALLEST)) * rows));
        this.numCells = Math.ceil(this.pool.numBlocks / this.perCell);
        this.#fit(width, SMALLEST);
      }
    }
    const rows = Math.ceil(this.numCells / this.columns);
    if (this.selected) this.numCells = rows * this.columns;
    const height = Math.max(1, rows) * this.cell;
    const scale = devicePixelRatio || 1;
    const [dotsWide, dotsHigh] = [Math.round(width * scale), Math.round(height * scale)];
    if (this.canvas.width !== dotsWide || this.canvas.height !== dotsHigh) {
      this.canvas.width = dotsWide;
      this.canvas.height = dotsHigh;
      this.canvas.style.height = `${height}px`;
    }
    return scale;
  }

  // Choose the largest cells with which all rows fit; return false if there are none.
  #fit(width, smallest) {
    for (this.cell = LARGEST; ; this.cell--) {
      this.columns = Math.max(1, Math.floor(width / this.cell));
      if (Math.ceil(this.numCells / this.columns) * this.cell <= MOST_HEIGHT) return true;
      if (this.cell === smallest) return false;
    }
  }

  // Return the blocks with content in ascending order, or null if there are more than `most`.
  #withContent(most) {
    const { holders, cached } = this.pool;
    if (Math.max(holders.size, cached.size) > most) return null;
    const blocks = [...new Set([...holders.keys(), ...cached])].sort((a, b) => a - b);
    return blocks.length > most ? null : blocks;
  }

  // `ink` has the current colours of the page: {free, cached, line, fresh}.
  draw(ink) {
    const scale = this.#layOut();
    const context = this.canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    for (let index = 0; index < this.numCells; index++) {
      const x = (index % this.columns) * this.cell;
      const y = Math.floor(index / this.columns) * this.cell;
      this.#drawCell(context, ink, x, y, this.#contents(index));
    }
    context.globalAlpha = 1;
  }

  // Return the states of the blocks of a cell; for several blocks, the number in each state.
  #contents(index) {
    const { pool } = this;
    const found = { size: 0, used: 0, cached: 0, owner: 0, isShared: false, isFresh: false, isChosen: false };
    for (const block of this.#blocksOf(index)) {
      const holders = pool.holders.get(block);
      found.size++;
      if (holders) {
        found.used++;
        found.owner ||= holders.includes(this.chosen) ? this.chosen : holders[0];
        found.isShared ||= holders.length > 1;
        found.isChosen ||= holders.includes(this.chosen);
        found.isFresh ||= pool.fresh.has(block);
      } else if (pool.cached.has(block)) {
        found.cached++;
      }
    }
    return found;
  }

  #blocksOf(index) {
    if (this.selected) return this.selected.slice(index, index + 1);
    const first = 1 + index * this.perCell; // block 0 is never allocated
    const length = Math.min(this.perCell, this.pool.numBlocks - first + 1);
    return Array.from({ length }, (_, i) => first + i);
  }

  #drawCell(context, ink, x, y, { size, used, cached, owner, isShared, isFresh, isChosen }) {
    const side = this.cell - (this.cell > 8 ? 2 : 1);
    const usedHeight = (side * used) / (size || 1);
    const cachedHeight = (side * cached) / (size || 1);
    context.globalAlpha = this.chosen !== null && !isChosen ? 0.3 : 1;
    context.fillStyle = ink.free;
    context.fillRect(x, y, side, side);
    context.fillStyle = ink.cached;
    context.fillRect(x, y + side - usedHeight - cachedHeight, side, cachedHeight);
    if (!used) return;
    context.fillStyle = colourOf(owner);
    context.fillRect(x, y + side - usedHeight, side, usedHeight);
    if (isShared) this.#drawCorner(context, ink, x, y, side);
    if (isFresh) this.#drawFrame(context, ink.fresh, x, y, side);
  }

  #drawCorner(context, ink, x, y, side) {
    const length = Math.max(2, side * 0.55);
    context.fillStyle = ink.fresh;
    context.beginPath();
    context.moveTo(x + side, y);
    context.lineTo(x + side, y + length);
    context.lineTo(x + side - length, y);
    context.fill();
  }

  #drawFrame(context, colour, x, y, side) {
    const width = side > 8 ? 1.5 : 1;
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.strokeRect(x + width / 2, y + width / 2, side - width, side - width);
  }

  // Return the blocks at a position on the canvas: [first, last], or null.
  blocksAt(x, y) {
    const column = Math.floor(x / this.cell);
    if (column < 0 || column >= this.columns || y < 0) return null;
    const blocks = this.#blocksOf(Math.floor(y / this.cell) * this.columns + column);
    return blocks.length ? [blocks[0], blocks.at(-1)] : null;
  }
}
