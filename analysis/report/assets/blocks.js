// The data of a page: the head at once, everything else as gzipped blocks that are decoded when asked for.

const HEAD = JSON.parse(document.getElementById("head").textContent);
const blocks = new Map();

async function decode(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

/** The content of a block of this page; null where there is none of this name. */
function block(name) {
  if (!blocks.has(name)) {
    const node = document.getElementById(name);
    blocks.set(name, node ? decode(node.textContent) : Promise.resolve(null));
  }
  return blocks.get(name);
}
