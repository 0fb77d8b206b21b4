// Views describe what is to be seen as a tree of plain objects; `patch` makes the document so, with as few
// changes as it can: an element that stays keeps its focus, its selection and its scroll position.

const SVG = "http://www.w3.org/2000/svg";
const PROPERTIES = new Set(["value", "checked", "disabled", "open", "hidden", "selected"]);
const NODE = Symbol("node");
const CLEANUP = Symbol("cleanup");

/**
 * A description of an element.
 *
 * Props: `key` (which sibling it is), `class`, `style` (an object), `on...` (handlers), `mount(element)`, and
 * attributes. An element with `mount` belongs to whoever it is given to: what `mount` returns is called when
 * the element leaves, and its children are not touched.
 *
 * @typedef {{tag: string, props: Record<string, any>, children: Array<Node>}} Element
 * @typedef {Element | string} Node
 * @param {string} tag
 * @param {Record<string, any> | null} [props]
 * @param {...any} children Descriptions, texts, lists of them; null, undefined and false are nothing.
 * @returns {Element}
 */
export function h(tag, props, ...children) {
  return { tag, props: props ?? {}, children: listed(children) };
}

function listed(children) {
  return children
    .flat(Infinity)
    .filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (typeof child === "object" ? child : String(child)));
}

/**
 * Make the children of `parent` be as described. What has the focus keeps it, if it is still there.
 *
 * @param {globalThis.Element} parent
 * @param {any} children
 */
export function patch(parent, children) {
  const focused = document.activeElement;
  patchChildren(parent, listed([children]));
  if (focused instanceof HTMLElement && focused !== document.activeElement && focused.isConnected) {
    focused.focus({ preventScroll: true });
  }
}

function patchChildren(parent, wanted) {
  const reused = match(parent, wanted);
  const kept = new Set(reused);
  for (const node of [...parent.childNodes]) {
    if (!kept.has(node)) {
      leave(node);
      node.remove();
    }
  }
  let next = parent.firstChild;
  wanted.forEach((description, index) => {
    const node = reused[index];
    if (node && node === next) {
      next = next.nextSibling;
      update(node, description);
    } else if (node) {
      parent.insertBefore(node, next);
      update(node, description);
    } else {
      create(parent, description, next);
    }
  });
}

/** For each description the present node that it can be made of, or undefined. */
function match(parent, wanted) {
  const free = new Map();
  for (const node of parent.childNodes) {
    const name = nameOf(node);
    if (!free.has(name)) free.set(name, []);
    free.get(name).push(node);
  }
  return wanted.map((description) => free.get(nameOfDescription(description))?.shift());
}

function nameOf(node) {
  if (node.nodeType === 3) return "";
  return node[NODE] ? nameOfDescription(node[NODE]) : undefined;
}

function nameOfDescription(description) {
  return typeof description === "string" ? "" : `${description.tag} ${description.props.key ?? ""}`;
}

function create(parent, description, before) {
  if (typeof description === "string") {
    parent.insertBefore(document.createTextNode(description), before);
    return;
  }
  const { tag, props } = description;
  const svg = tag === "svg" || (parent.namespaceURI === SVG && parent.tagName !== "foreignObject");
  const element = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  element[NODE] = description;
  // The children come first: a select takes its value only once it has that option.
  if (!props.mount) patchChildren(element, description.children);
  for (const name of Object.keys(props)) set(element, name, props[name], undefined);
  parent.insertBefore(element, before);
  if (props.mount) element[CLEANUP] = props.mount(element);
}

function update(node, description) {
  if (typeof description === "string") {
    if (node.nodeValue !== description) node.nodeValue = description;
    return;
  }
  const before = node[NODE].props;
  const { props } = description;
  node[NODE] = description;
  if (!props.mount) patchChildren(node, description.children);
  for (const name of Object.keys(before)) if (!(name in props)) set(node, name, undefined, before[name]);
  for (const name of Object.keys(props)) set(node, name, props[name], before[name]);
}

function set(element, name, value, before) {
  if (name === "key" || name === "mount") return;
  if (name === "style") {
    for (const property of Object.keys(before ?? {})) if (!(property in (value ?? {}))) element.style.removeProperty(property);
    for (const [property, one] of Object.entries(value ?? {})) element.style.setProperty(property, one);
  } else if (name.startsWith("on")) {
    element[name] = value ?? null;
  } else if (value === before) {
    return; // What the user has typed or opened since stays.
  } else if (PROPERTIES.has(name)) {
    element[name] = value ?? (name === "value" ? "" : false);
  } else if (value === undefined || value === null || value === false) {
    element.removeAttribute(name);
  } else {
    element.setAttribute(name, value === true ? "" : String(value));
  }
}

function leave(node) {
  node[CLEANUP]?.();
  node.childNodes.forEach(leave);
}
