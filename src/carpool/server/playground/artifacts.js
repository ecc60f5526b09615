// Meshes to turn and sound with its wave. A GLB is read here: the arrays that this server writes.

import { el } from "./dom.js";

export const isMeshFile = (name) => /\.(glb|obj|ply)$/.test(name);
export const isSoundFile = (name) => /\.(wav|flac|mp3)$/.test(name);

const VERTEX = `#version 300 es
in vec3 place; in vec4 colour; uniform mat4 turn; out vec3 at; out vec3 tint;
void main() { gl_Position = turn * vec4(place, 1.0); at = (turn * vec4(place, 1.0)).xyz; tint = colour.rgb; }`;
const FRAGMENT = `#version 300 es
precision highp float; in vec3 at; in vec3 tint; out vec4 shade;
void main() { float light = abs(normalize(cross(dFdx(at), dFdy(at))).z); shade = vec4(tint * (0.3 + 0.7 * light), 1.0); }`;
const MOST_DRAWN = 20000; // faces, where there is no WebGL

/** Vertices, faces and colours of a GLB. */
export function readGlb(buffer) {
  const view = new DataView(buffer);
  const textBytes = view.getUint32(12, true);
  const document = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 20, textBytes)));
  const values = (number) => {
    const accessor = document.accessors[number];
    const part = document.bufferViews[accessor.bufferView];
    const kinds = { 5126: Float32Array, 5125: Uint32Array, 5121: Uint8Array };
    const kind = kinds[accessor.componentType];
    const at = 28 + textBytes + part.byteOffset;
    return new kind(buffer.slice(at, at + part.byteLength));
  };
  const [primitive] = document.meshes[0].primitives;
  const { POSITION, COLOR_0 } = primitive.attributes;
  return { vertices: values(POSITION), faces: values(primitive.indices), colours: COLOR_0 === undefined ? null : values(COLOR_0) };
}

/** Vertices moved and scaled into the cube from -1 to 1. */
function centred(vertices) {
  const low = [Infinity, Infinity, Infinity];
  const high = low.map((value) => -value);
  vertices.forEach((value, i) => { low[i % 3] = Math.min(low[i % 3], value); high[i % 3] = Math.max(high[i % 3], value); });
  const scale = 1.2 / Math.max(1e-9, ...high.map((value, i) => value - low[i]));
  return vertices.map((value, i) => (value - (low[i % 3] + high[i % 3]) / 2) * scale);
}

/** The columns of a rotation by two angles, with a zoom; z is small enough to be inside. */
function rotation(yaw, pitch, zoom) {
  const [cy, sy, cp, sp] = [Math.cos(yaw), Math.sin(yaw), Math.cos(pitch), Math.sin(pitch)];
  return [cy * zoom, sp * sy * zoom, -cp * sy / 2, 0, 0, cp * zoom, sp / 2, 0, sy * zoom, -sp * cy * zoom, cp * cy / 2, 0, 0, 0, 0, 1];
}

/** Draws by WebGL; null where there is none. */
function painter(canvas, { faces, colours }, vertices) {
  const gl = canvas.getContext("webgl2", { preserveDrawingBuffer: true });
  if (!gl) return null;
  const program = gl.createProgram();
  [[gl.VERTEX_SHADER, VERTEX], [gl.FRAGMENT_SHADER, FRAGMENT]].forEach(([kind, text]) => {
    const shader = gl.createShader(kind);
    gl.shaderSource(shader, text);
    gl.compileShader(shader);
    gl.attachShader(program, shader);
  });
  gl.linkProgram(program);
  gl.useProgram(program);
  const fill = (target, data) => { gl.bindBuffer(target, gl.createBuffer()); gl.bufferData(target, data, gl.STATIC_DRAW); };
  const place = gl.getAttribLocation(program, "place");
  fill(gl.ARRAY_BUFFER, vertices);
  gl.enableVertexAttribArray(place);
  gl.vertexAttribPointer(place, 3, gl.FLOAT, false, 0, 0);
  const colour = gl.getAttribLocation(program, "colour");
  if (colours) {
    fill(gl.ARRAY_BUFFER, colours);
    gl.enableVertexAttribArray(colour);
    gl.vertexAttribPointer(colour, 4, gl.UNSIGNED_BYTE, true, 0, 0);
  } else gl.vertexAttrib4f(colour, 0.75, 0.78, 0.85, 1);
  fill(gl.ELEMENT_ARRAY_BUFFER, faces);
  gl.enable(gl.DEPTH_TEST);
  return (turn) => {
    gl.uniformMatrix4fv(gl.getUniformLocation(program, "turn"), false, turn);
    gl.clear(gl.COLOR_BUFFER_BIT | gl.DEPTH_BUFFER_BIT);
    gl.drawElements(gl.TRIANGLES, faces.length, gl.UNSIGNED_INT, 0);
  };
}

/** Draws on a plain canvas, the farthest faces first, and of a fine mesh only some of them. */
function sketcher(canvas, { faces }, vertices) {
  const context = canvas.getContext("2d");
  const every = Math.max(1, Math.ceil(faces.length / 3 / MOST_DRAWN));
  return (turn) => {
    const side = canvas.width / 2;
    const at = (vertex) => [0, 1, 2].map((row) => [0, 1, 2].reduce((sum, axis) => sum + turn[axis * 4 + row] * vertices[vertex * 3 + axis], 0));
    const corners = [];
    for (let i = 0; i < faces.length; i += 3 * every) corners.push([faces[i], faces[i + 1], faces[i + 2]].map(at));
    corners.sort((a, b) => b[0][2] + b[1][2] + b[2][2] - a[0][2] - a[1][2] - a[2][2]);
    context.clearRect(0, 0, canvas.width, canvas.height);
    for (const [a, b, c] of corners) {
      const cross = (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0]);
      const size = Math.hypot(b[0] - a[0], b[1] - a[1]) * Math.hypot(c[0] - a[0], c[1] - a[1]) || 1;
      const light = 60 + 160 * Math.abs(cross / size);
      context.fillStyle = `rgb(${light}, ${light}, ${light})`;
      context.beginPath();
      for (const [x, y] of [a, b, c]) context.lineTo(side * (1 + x), side * (1 - y));
      context.fill();
    }
  };
}

/** A mesh that turns by the pointer or the arrow keys, and grows by the wheel, + and -. */
export async function meshView(content, name, text) {
  if (!name.endsWith(".glb")) return el("div.shot.blank.still", {}, `a mesh: ${name}`);
  const canvas = el("canvas.mesh", { width: 512, height: 512, tabIndex: 0, role: "img", "aria-label": `A mesh, turned by arrow keys: ${text}` });
  const mesh = readGlb(await content.arrayBuffer());
  const vertices = centred(mesh.vertices);
  const draw = painter(canvas, mesh, vertices) || sketcher(canvas, mesh, vertices);
  let [yaw, pitch, zoom] = [0.5, 0.35, 1];
  const show = (right = 0, down = 0, grow = 1) => {
    yaw += right;
    pitch = Math.max(-1.5, Math.min(1.5, pitch + down));
    zoom = Math.max(0.2, Math.min(8, zoom * grow));
    draw(rotation(yaw, pitch, zoom));
  };
  canvas.addEventListener("pointerdown", (event) => canvas.setPointerCapture(event.pointerId));
  canvas.addEventListener("pointermove", (event) => { if (event.buttons) show(event.movementX / 100, event.movementY / 100); });
  canvas.addEventListener("wheel", (event) => { event.preventDefault(); show(0, 0, Math.exp(-event.deltaY / 500)); }, { passive: false });
  const keys = { ArrowLeft: [-0.2], ArrowRight: [0.2], ArrowUp: [0, -0.2], ArrowDown: [0, 0.2], "+": [0, 0, 1.2], "-": [0, 0, 1 / 1.2] };
  canvas.addEventListener("keydown", (event) => { if (keys[event.key]) { event.preventDefault(); show(...keys[event.key]); } });
  show();
  return canvas;
}

/** The samples of a first channel: of a WAV as this server writes it, of others as the browser decodes them. */
async function samplesOf(content, name) {
  const buffer = await content.arrayBuffer();
  if (!name.endsWith(".wav")) return (await new OfflineAudioContext(1, 1, 44100).decodeAudioData(buffer)).getChannelData(0);
  const view = new DataView(buffer);
  const levels = new Int16Array(buffer.slice(44, 44 + view.getUint32(40, true)));
  return Float32Array.from(levels.filter((_, i) => i % view.getUint16(22, true) === 0), (level) => level / 32768);
}

/** Sound with controls, and its wave above them. */
export async function soundView(content, name, url, text) {
  const canvas = el("canvas.wave", { width: 512, height: 96, role: "img", "aria-label": `The wave of: ${text}` });
  const player = el("audio", { src: url, controls: true, "aria-label": text });
  try {
    const samples = await samplesOf(content, name);
    const context = canvas.getContext("2d");
    context.fillStyle = "#7c8cff";
    const step = Math.max(1, samples.length / canvas.width);
    for (let x = 0; x < canvas.width; x += 1) {
      const part = samples.subarray(Math.floor(x * step), Math.floor((x + 1) * step) + 1);
      const peak = part.reduce((most, value) => Math.max(most, Math.abs(value)), 0.01);
      context.fillRect(x, 48 * (1 - peak), 1, 96 * peak);
    }
  } catch { /* a format that this browser does not decode: it may play all the same */ }
  return el("div.sound", {}, canvas, player);
}
