// What the engine does at present, in a few sentences for newcomers.

// "One request is", "3 requests are"
const are = (n) => (n === 1 ? "One request is" : `${n.toLocaleString("en")} requests are`);

// `state` is {requests, waiting, numbers} of the last event, and `pool` the state of the KV cache.
export function captionOf({ requests: running, numbers }, pool) {
  const numWaiting = numbers.num_waiting + numbers.num_held;
  const sentences = [...runningText(running, pool), ...waitingText(numWaiting, running.length)];
  if (sentences.length) return sentences.join(" ");
  if (!pool.numCachedFree) return "The engine is idle. Ask something, and watch its blocks fill.";
  return "The engine is idle. The grey blocks still hold what it has computed: a request that begins alike need not compute it again.";
}

function runningText(running, pool) {
  if (!running.length) return [];
  const numPrefill = running.filter(([, prompt, , computed]) => computed < prompt).length;
  const numDecode = running.length - numPrefill;
  const sentences = [];
  if (numPrefill) sentences.push(`${are(numPrefill)} in prefill: the tokens of the prompt are computed, many in a step.`);
  if (numDecode) {
    const next = numDecode === 1 ? "its next token" : "the next token of each";
    sentences.push(`${are(numDecode)} generating: each step computes ${next}.`);
  }
  const numReused = running.filter(([, , cached]) => cached).length;
  if (numReused) {
    const what = running.length === 1 ? "A part of its prompt was" : `Parts of the prompts of ${numReused} were`;
    sentences.push(`${what} in the cache, and not computed again.`);
  }
  if (pool.numShared) sentences.push("Blocks with a corner are shared by requests that begin alike.");
  return sentences;
}

function waitingText(numWaiting, numRunning) {
  if (!numWaiting) return [];
  const waits = `${are(numWaiting)} waiting`;
  return [numRunning ? `${waits} for room beside those that run.` : `${waits} to begin.`];
}
