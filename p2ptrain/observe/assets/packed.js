// What the page contains compressed: the chart library and the rounds of an exported page.

/** Returns the content of an element, which is gzip in base64. */
export function unpacked(element) {
  const bytes = Uint8Array.from(atob(element.textContent), (each) => each.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip")));
}
