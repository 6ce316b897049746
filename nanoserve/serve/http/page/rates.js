// Tokens per second, now and over the last minute, computed from totals at irregular times; and the
// small charts of them.

const MINUTE = 60;
const WINDOW = 1; // seconds over which the current rate is averaged

export class Rates {
  #offset = 0; // of the server's clock relative to the browser's, in seconds
  #points = []; // {time, tokens, steps, seconds}: totals, oldest first

  add({ time, num_output_tokens: tokens, num_steps: steps, step_seconds: seconds }) {
    const last = this.#points.at(-1);
    if (last && (time < last.time || steps < last.steps)) this.#points = []; // another observer
    this.#offset = time - performance.now() / 1000;
    this.#points.push({ time, tokens, steps, seconds });
    while (this.#points.length > 2 && this.#points[1].time < time - MINUTE - WINDOW) this.#points.shift();
  }

  // Tokens in the last second, and the mean duration of its steps, or null if there was none.
  now() {
    const end = this.#at(this.#clock());
    const start = this.#at(this.#clock() - WINDOW);
    if (!end || !start) return { rate: 0, stepSeconds: null };
    const numSteps = end.steps - start.steps;
    const stepSeconds = numSteps ? (end.seconds - start.seconds) / numSteps : null;
    return { rate: (end.tokens - start.tokens) / WINDOW, stepSeconds };
  }

  // Tokens in each second of the last minute, oldest first.
  lastMinute() {
    const clock = Math.floor(this.#clock());
    const totals = Array.from({ length: MINUTE + 1 }, (_, i) => this.#at(clock - MINUTE + i)?.tokens ?? 0);
    return totals.slice(1).map((total, i) => total - totals[i]);
  }

  #clock() {
    return performance.now() / 1000 + this.#offset;
  }

  // The totals at a given time: those of the last point before it, or of the first point.
  #at(time) {
    let [low, high] = [0, this.#points.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.#points[middle].time <= time) low = middle + 1;
      else high = middle;
    }
    return this.#points[Math.max(0, low - 1)];
  }
}

function prepared(canvas) {
  const scale = devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  return { context, width, height };
}

export function drawLine(canvas, values, colour) {
  const { context, width, height } = prepared(canvas);
  const most = Math.max(1, ...values);
  const x = (i) => (width * i) / (values.length - 1);
  const y = (value) => height - 1.5 - (height - 3) * (value / most);
  context.beginPath();
  values.forEach((value, i) => context.lineTo(x(i), y(value)));
  context.strokeStyle = colour;
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  context.stroke();
  context.lineTo(width, height);
  context.lineTo(0, height);
  context.globalAlpha = 0.12;
  context.fillStyle = colour;
  context.fill();
}

export function drawBars(canvas, values, colour) {
  const { context, width, height } = prepared(canvas);
  const most = Math.max(1e-9, ...values);
  const step = Math.min(8, width / 32);
  context.fillStyle = colour;
  values.forEach((value, i) => {
    const tall = Math.max(1.5, height * (value / most));
    context.globalAlpha = i === values.length - 1 ? 1 : 0.45;
    context.fillRect(width - (values.length - i) * step, height - tall, step - 1.5, tall);
  });
}
