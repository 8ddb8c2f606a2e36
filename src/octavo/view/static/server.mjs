// Requests to the server. Paths are relative to the page, since a proxy may have put a prefix before it.

// Throws an `Error` with the server's message.
export async function fetchJson(path, body) {
  const options = body && {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  };
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new Error("The server does not respond.");
  }
  const reply = await response.json().catch(() => null);
  if (!response.ok) throw new Error(reply?.error?.message ?? `The server returned status ${response.status}.`);
  return reply;
}

export async function copyLink(button, fragment) {
  const link = new URL(`#${fragment}`, location.href).href;
  const label = (button.dataset.label ??= button.textContent); // the text may still be that of the last click
  try {
    await navigator.clipboard.writeText(link);
    button.textContent = "Copied";
  } catch {
    // Not allowed, for example without https: put the link into the address bar.
    history.replaceState(null, "", link);
    button.textContent = "See the address";
  }
  setTimeout(() => (button.textContent = label), 1500);
}
